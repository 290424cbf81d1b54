"""The order of a loader's stream: which indices element (epoch, index) is made from, without loading anything.

Torch's own samplers are a recipe that every machine computes for itself: per epoch the random numbers are drawn in the
order in which ``for epoch in range(E): list(loader)`` draws them in one process after ``torch.manual_seed(seed)``.
``iter(loader)`` starts the sampler's iterator (torch's draw nothing yet), draws the loader workers' base seed from
``loader.generator``, and only then does the sampler draw; persistent loader workers draw no base seed after the first
epoch. Any other sampler is run once and written down (``taas_tasks.prep.order_chunks``).

A row is what the loader's sampler or batch_sampler yields for one element: a list of indices, or one index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Generator
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

_BLOCK = 1 << 20  # indices drawn at once with replacement; a multiple of 32, as torch draws them by 32
_KEPT_BLOCKS = 2
_KEPT_EPOCHS = 8
_FIXED = (list, tuple, range)


class Order(Protocol):
    """Gives the rows of any stretch of any epoch."""

    def rows(self, epoch: int, start: int, stop: int) -> list[Any]:
        """Return the rows of elements [start, stop) of an epoch."""


def index_sampler(loader: DataLoader[Any]) -> Any:
    """Return what yields the rows: the batch_sampler, or the sampler where there is none."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def is_recipe(loader: DataLoader[Any]) -> bool:
    """Return whether the order follows from seeds alone: torch's own samplers (not subclasses) or a plain sequence."""
    sampler = index_sampler(loader)
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    known = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
    return type(sampler) in known or isinstance(sampler, _FIXED)


class RecipeOrder:
    """The order of a loader for which ``is_recipe`` holds. Reads the loader's generators, never advances them.

    Epochs are cheap in sequence; going back more than a few epochs starts again from the first. Memory: 8 bytes per
    sample of one or two epochs at most.
    """

    def __init__(self, loader: DataLoader[Any], *, seed: int) -> None:
        sampler: Any = index_sampler(loader)
        self._batching: Any = sampler if type(sampler) is BatchSampler else None
        base: Any = sampler if self._batching is None else self._batching.sampler
        self._sampler = base
        self._draws_base_seed_once = loader.persistent_workers and loader.num_workers > 0
        self._loader_generator = loader.generator
        self._draws = _Draws(seed, [loader.generator, getattr(self._sampler, "generator", None)])
        self._starts = {0: self._draws.states()}
        self._epochs: dict[int, _Source] = {}
        self._base_seeds: dict[int, int] = {}
        self.epoch_length = self._count(len(self._sampler))

    def rows(self, epoch: int, start: int, stop: int) -> list[Any]:
        """Return the rows of elements [start, stop) of an epoch; cut at the epoch's end."""
        source = self._source(epoch)
        if self._batching is None:
            return source.take(start, min(stop, source.length))
        size = self._batching.batch_size
        stop = min(stop, self.epoch_length)
        indices = source.take(start * size, min(stop * size, source.length))
        return [indices[at : at + size] for at in range(0, len(indices), size)]

    def base_seed(self, epoch: int) -> int:
        """Return the base seed of the loader workers that are started for an epoch (for the first one's, if they stay).

        It is what ``iter(loader)`` draws before the sampler draws.
        """
        started_in = 0 if self._draws_base_seed_once else epoch
        if started_in not in self._base_seeds:
            self._source(started_in)
        return self._base_seeds[started_in]

    def _count(self, samples: int) -> int:
        if self._batching is None:
            return samples
        size = int(self._batching.batch_size)
        return samples // size if self._batching.drop_last else -(-samples // size)

    def _source(self, epoch: int) -> _Source:
        if epoch not in self._epochs:
            begun = max(known for known in self._starts if known <= epoch)
            self._draws.restore(self._starts[begun])
            for passed in range(begun, epoch):
                self._begin(passed).finish()
                self._starts[passed + 1] = self._draws.states()
            self._epochs[epoch] = self._begin(epoch)
            _keep_newest(self._epochs, 2)
            _keep_newest(self._starts, _KEPT_EPOCHS, always=0)
        return self._epochs[epoch]

    def _begin(self, epoch: int) -> _Source:
        if epoch == 0 or not self._draws_base_seed_once:
            self._base_seeds[epoch] = _draw_seed(self._draws.of(self._loader_generator))
        return _source_of(self._sampler, self._draws)


def _keep_newest(found: dict[int, Any], count: int, *, always: int | None = None) -> None:
    """Drop what was put in first, down to ``count`` entries besides ``always``."""
    old = [key for key in found if key != always]
    for key in old[: max(0, len(old) - count)]:
        del found[key]


def _draw_seed(generator: Generator) -> int:
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


class _Draws:
    """Private stand-ins of the global generator and of the generators that the user gave, in step with one process."""

    def __init__(self, seed: int, given: Sequence[Generator | None]) -> None:
        everywhere = Generator()
        everywhere.manual_seed(seed)
        self._generators: dict[int, Generator] = {id(None): everywhere}
        for generator in given:
            if generator is not None:
                self._generators.setdefault(id(generator), _clone(generator))

    def of(self, generator: Generator | None) -> Generator:
        """Return the stand-in of a generator (None: the global one)."""
        return self._generators[id(generator)]

    def states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._generators.values()]

    def restore(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators.values(), states, strict=True):
            generator.set_state(state)


def _clone(generator: Generator) -> Generator:
    clone = Generator()
    clone.set_state(generator.get_state())
    return clone


# --- the samples of one epoch ---------------------------------------------------------------------------------------


class _Source(Protocol):
    """The samples of one epoch. ``finish`` leaves the generators as a whole pass leaves them."""

    length: int

    def take(self, start: int, stop: int) -> list[Any]: ...

    def finish(self) -> None: ...


class _Fixed:
    """Samples that are there at once; ``through`` maps drawn positions to indices."""

    def __init__(self, samples: Sequence[Any] | torch.Tensor, through: Sequence[Any] | None = None) -> None:
        self._samples = samples
        self._through = through
        self.length = len(samples)

    def take(self, start: int, stop: int) -> list[Any]:
        part = self._samples[start:stop]
        found = part.tolist() if isinstance(part, torch.Tensor) else list(part)
        return found if self._through is None else [self._through[position] for position in found]

    def finish(self) -> None:
        """Nothing: all was drawn at the start."""


class _Blocks:
    """Samples drawn block by block from one generator; states at the blocks' starts allow going back."""

    def __init__(
        self,
        generator: Generator,
        draw: Callable[[Generator, int], torch.Tensor],
        *,
        block: int,
        length: int,
        count: int,
        is_shared: bool,
    ) -> None:
        self._generator = generator if is_shared else None  # else nobody draws from it after this epoch
        self._own = _clone(generator)
        self._draw = draw
        self._block = block
        self._count = count
        self._states = [self._own.get_state()]
        self._kept: dict[int, torch.Tensor] = {}
        self.length = length

    def take(self, start: int, stop: int) -> list[Any]:
        found: list[Any] = []
        while start < stop:
            number, offset = divmod(start, self._block)
            part = self._get(number)[offset : offset + stop - start]
            found += part.tolist()
            start += len(part)
        return found

    def finish(self) -> None:
        if self._generator is None:
            return
        for number in range(len(self._states) - 1, self._count):
            self._get(number)
        self._generator.set_state(self._states[self._count])

    def _get(self, number: int) -> torch.Tensor:
        if number not in self._kept:
            for passed in range(min(number, len(self._states) - 1), number + 1):
                self._own.set_state(self._states[passed])
                self._kept[passed] = self._draw(self._own, passed)
                if passed + 1 == len(self._states):
                    self._states.append(self._own.get_state())
            while len(self._kept) > _KEPT_BLOCKS:
                del self._kept[next(iter(self._kept))]
        return self._kept[number]


def _source_of(sampler: Any, draws: _Draws) -> _Source:
    """Return the samples of one pass of a sampler, drawn as ``iter(sampler)`` draws them."""
    if type(sampler) is SequentialSampler:
        return _Fixed(range(len(sampler)))
    if type(sampler) is RandomSampler:
        return _random_source(sampler, draws)
    if type(sampler) is SubsetRandomSampler:
        return _Fixed(torch.randperm(len(sampler.indices), generator=draws.of(sampler.generator)), sampler.indices)
    if type(sampler) is WeightedRandomSampler:
        generator = draws.of(sampler.generator)
        return _Fixed(torch.multinomial(sampler.weights, sampler.num_samples, sampler.replacement, generator=generator))
    return _Fixed(sampler)


def _random_source(sampler: RandomSampler, draws: _Draws) -> _Source:
    if sampler.generator is None:
        generator = Generator()
        generator.manual_seed(_draw_seed(draws.of(None)))
    else:
        generator = draws.of(sampler.generator)
    population, length = len(sampler.data_source), sampler.num_samples
    is_shared = sampler.generator is not None
    if sampler.replacement:
        # one draw of 2**20 gives what torch's many draws of 32 give (a test holds it to that)
        def draw(own: Generator, number: int) -> torch.Tensor:
            size = min(_BLOCK, length - number * _BLOCK)
            return torch.randint(high=population, size=(size,), dtype=torch.int64, generator=own)

        return _Blocks(generator, draw, block=_BLOCK, length=length, count=-(-length // _BLOCK), is_shared=is_shared)

    def permute(own: Generator, number: int) -> torch.Tensor:
        return torch.randperm(population, generator=own)

    # torch draws the last, partial permutation also when nothing of it is needed
    count = length // population + 1
    return _Blocks(generator, permute, block=population, length=length, count=count, is_shared=is_shared)
