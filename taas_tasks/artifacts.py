"""What rank 0 wrote: staged by the node agent when the ranks have ended, published by ``upload`` as one record.

Rules:

- A file counts when its content, or its executable bit, differs from the snapshot that the run began with. Which files
  are looked at, and which are left out with a note, says ``taas_tasks.tree``.
- A file of the snapshot that the run deleted stays in the project, with a note: checkpoint callbacks delete old files
  as a matter of course, and a deletion in a training must not take away what the user put there.
- A file that someone else changed since the run began is never overwritten: the run's version is kept beside it as
  ``name.from-RUN.ext``.
- Staging shows nothing: contents are blobs, the list lies below the run's keys. Publishing adds one numbered record, so
  all files become visible at once or none does.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

from taas.errors import ArtifactError, ObjectMissing, ProjectError
from taas_tasks import project as projects
from taas_tasks.blobs import FileEntry, describe_file, has_blob, in_threads, put_blob
from taas_tasks.layout import ProjectKeys, RunKeys
from taas_tasks.project import Draft, Files, HistoryRecord
from taas_tasks.store import ObjectStore
from taas_tasks.tree import file_above, parents, scan
from taas_tasks.values import Artifact, ArtifactRecord, StagedArtifacts


def stage(
    store: ObjectStore, project: str, base_snapshot: str, folder: Path, *, run: str, generation: int
) -> StagedArtifacts:
    """Upload the new and changed files of a project folder and write the list of them; nothing is visible by that.

    To be called when no process of the run writes the folder any more. Doing it twice gives the same.

    Args:
        store: where the project is.
        project: its name.
        base_snapshot: what the folder held when the run began.
        folder: rank 0's project folder.
        run: the run's key.
        generation: the number of the try; the list goes below its prefix.

    Raises:
        ArtifactError: a file cannot be read, changes while it is read, or has a name that no project can keep.
    """
    base = projects.snapshot_files(store, project, base_snapshot)
    try:
        found = scan(folder)
        described = dict(zip(found.files, in_threads(describe_file, found.files.values()), strict=True))
        changed = [path for path, entry in described.items() if base.get(path) != entry]
        keys = ProjectKeys(project)
        entries = in_threads(lambda path: put_blob(store, keys, found.files[path]), changed)
    except ProjectError as error:
        raise ArtifactError(f"rank 0's files cannot be kept: {error.message}", **error.fields) from error
    except OSError as error:
        raise ArtifactError(f"rank 0's file {error.filename!r} cannot be read: {error.strerror}") from error
    deleted = sorted(set(base) - set(found.files) - set(found.skipped))
    notes = [f"{path!r} was left out: it is {reason}" for path, reason in sorted(found.skipped.items())]
    notes += [f"{path!r} was deleted by the run and stays in the project" for path in deleted]
    staged = StagedArtifacts(
        run=run,
        generation=generation,
        base_snapshot=base_snapshot,
        files=[_artifact(path, entry) for path, entry in zip(changed, entries, strict=True)],
        notes=notes,
    )
    store.put(RunKeys(run).staged(generation), staged.to_bytes())
    return staged


def _artifact(path: str, entry: FileEntry) -> Artifact:
    return Artifact(path=path, sha256=entry.sha256, bytes=entry.bytes, mode=entry.mode)


def read_staged(store: ObjectStore, run: str, generation: int) -> StagedArtifacts:
    """Return what a try of a run has staged.

    Raises:
        ArtifactError: it staged nothing: the training did not come that far.
    """
    try:
        return StagedArtifacts.model_validate_json(store.get(RunKeys(run).staged(generation)))
    except ObjectMissing:
        raise ArtifactError(
            f"try {generation} of run {run!r} has staged no artifacts: its training did not end well",
            run=run,
            generation=generation,
        ) from None


def publish(store: ObjectStore, staged: StagedArtifacts, *, project: str, base_record: int = 0) -> ArtifactRecord:
    """Add what a try has staged to the project as one record. Doing it twice, or twice at once, gives one record.

    Args:
        store: where the project is.
        staged: what ``stage`` has made; the caller sees to it that it is the current try's.
        project: its name.
        base_record: the project's record that the run began with (``PinnedRequest.base_record``): an earlier record of
            this run is looked for behind it only.

    Raises:
        ArtifactError: a content is not in the store.
    """
    entries = {item.path: FileEntry(sha256=item.sha256, bytes=item.bytes, mode=item.mode) for item in staged.files}
    _refuse_missing(store, project, entries)
    base = projects.snapshot_files(store, project, staged.base_snapshot)

    def draft(newest: HistoryRecord) -> Draft | HistoryRecord:
        mine = _published(store, project, staged, after=base_record)
        if mine is not None:
            return mine
        files = projects.snapshot_files(store, project, newest.snapshot)
        merged, beside = merge(entries, base=base, head=files, run=staged.run)
        snapshot = projects.put_snapshot(store, project, merged)
        return Draft(snapshot=snapshot, message=f"artifacts of run {staged.run}", kept_beside=beside)

    record = projects.append(store, project, draft, author="taas", run=staged.run, generation=staged.generation)
    return ArtifactRecord(
        project=project,
        record=record.number,
        snapshot=record.snapshot,
        files=staged.files,
        kept_beside=record.kept_beside,
        notes=staged.notes,
    )


def _refuse_missing(store: ObjectStore, project: str, entries: Files) -> None:
    keys = ProjectKeys(project)
    there = in_threads(lambda entry: has_blob(store, keys, entry), entries.values())
    missing = [path for path, found in zip(entries, there, strict=True) if not found]
    if missing:
        raise ArtifactError(f"the contents of {missing[:10]} are not in the store: stage them again", paths=missing)


def _published(store: ObjectStore, project: str, staged: StagedArtifacts, *, after: int) -> HistoryRecord | None:
    mine = (staged.run, staged.generation)
    records = projects.history(store, project, after=after)
    return next((record for record in records if (record.run, record.generation) == mine), None)


def merge(entries: Files, *, base: Files, head: Files, run: str) -> tuple[Files, dict[str, str]]:
    """Return the next version of the project, and what was kept beside (path -> where it is). Pure.

    Args:
        entries: the files that the run wrote.
        base: the version that the run began with.
        head: the version now.
        run: the run's key, which names what is kept beside.
    """
    merged, beside = dict(head), dict[str, str]()
    folders = {folder for path in head for folder in parents(path)}

    def is_free(place: str, *olds: FileEntry | None) -> bool:
        return merged.get(place) in olds and place not in folders and file_above(place, merged) is None

    for path, entry in sorted(entries.items()):
        place = path
        if not is_free(path, base.get(path), entry):
            names = _beside(path, run=run, above=file_above(path, merged))
            place = beside[path] = next(name for name in names if is_free(name, None, entry))
        merged[place] = entry
        folders.update(parents(place))
    return merged, beside


def _beside(path: str, *, run: str, above: str | None) -> Iterator[str]:
    """Yield names beside ``path``, or beside the file ``above`` it that stands where it needs a folder."""
    changed = above or path
    folder, slash, name = changed.rpartition("/")
    stem, dot, ending = name.rpartition(".")
    stem, ending = (stem, dot + ending) if stem else (name, "")
    for number in count(1):
        label = f".from-{run}{'' if number == 1 else f'-{number}'}{ending}"
        kept = stem.encode()[: 255 - len(label.encode())].decode(errors="ignore")
        yield folder + slash + kept + label + path[len(changed) :]
