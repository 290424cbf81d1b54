from pathlib import Path

import pytest

from taas.errors import RequestError, TaasError
from taas.flavors import FLAVORS, PREP_FLAVOR, Flavor, gpu_choices, gpu_flavors, hosts_for, load_flavors


def site_file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "flavors.toml"
    path.write_text(text)
    return path


def test_the_table_is_that_of_the_design() -> None:
    rows = [(f.name, f.vcpus, f.gpus, f.gpu_model, f.ram_gb, f.price) for f in FLAVORS.values()]
    assert rows == [
        ("c1.4", 4, 0, None, 32, 4),
        ("c1.8", 8, 0, None, 64, 8),
        ("c1.32", 32, 0, None, 256, 32),
        ("c1.80", 80, 0, None, 640, 80),
        ("g1.1", 8, 1, "V100", 96, 72),
        ("g1.2", 16, 2, "V100", 192, 144),
        ("g1.4", 32, 4, "V100", 384, 288),
        ("g2.1", 28, 1, "A100", 119, 116),
        ("g2.2", 56, 2, "A100", 238, 232),
        ("g2.4", 112, 4, "A100", 476, 464),
        ("g2.8", 224, 8, "A100", 952, 928),
    ]
    assert FLAVORS["g2.8"].price / FLAVORS[PREP_FLAVOR].price == 232


def test_gpu_flavors_leave_the_cpu_ones_out() -> None:
    assert gpu_flavors() == ["g1.1", "g1.2", "g1.4", "g2.1", "g2.2", "g2.4", "g2.8"]


@pytest.mark.parametrize(("gpus", "hosts"), [(8, 1), (16, 2), (32, 4)])
def test_gpus_of_whole_hosts_give_their_number(gpus: int, hosts: int) -> None:
    assert hosts_for(FLAVORS["g2.8"], gpus) == hosts
    assert gpus in gpu_choices(FLAVORS["g2.8"])


def test_gpus_that_fill_no_allowed_number_of_hosts_are_refused_with_the_nearest() -> None:
    with pytest.raises(RequestError, match=r"got 24; allowed on g2\.8: 8, 16, 32 .* Did you mean 16\?") as caught:
        hosts_for(FLAVORS["g2.8"], 24)
    assert [fault["field"] for fault in caught.value.fields["faults"]] == ["gpus"]


def test_a_cpu_flavor_has_no_hosts_for_training() -> None:
    with pytest.raises(RequestError, match=r"'c1\.4' has no GPUs; training takes one of: g1\.1"):
        hosts_for(FLAVORS["c1.4"], 1)


def test_a_flavor_of_the_site_has_hosts_too() -> None:
    assert hosts_for(Flavor("g3.4", 96, 4, "H100", 512, 999), 16) == 4


def test_without_a_site_file_the_built_in_table_is_given_as_a_copy() -> None:
    flavors = load_flavors(None)
    assert flavors == FLAVORS
    assert flavors is not FLAVORS


def test_a_site_file_adds_and_overrides(tmp_path: Path) -> None:
    path = site_file(
        tmp_path,
        """
        [flavors."g3.8"]
        vcpus = 192
        gpus = 8
        gpu_model = "H100"
        ram_gb = 2048
        price = 1800.5
        [flavors."c1.4"]
        price = 5
        """,
    )
    flavors = load_flavors(path)
    assert flavors["g3.8"] == Flavor("g3.8", 192, 8, "H100", 2048, 1800.5)
    assert flavors["c1.4"] == Flavor("c1.4", 4, 0, None, 32, 5)
    assert flavors["g2.8"] == FLAVORS["g2.8"]
    assert FLAVORS["c1.4"].price == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[flavors", "not a TOML file"),
        ("[flavor]\n", r"got flavor at the top; allowed: tables named like \[flavors"),
        ("flavors = 3", "allowed: tables named like"),
        ("[flavors]\n'g3.8' = 3", "'g3.8': got 3; allowed: a table"),
        ("[flavors.g3.8]\nvcpus = 1", r"a name with a dot is quoted: \[flavors\.\"g3\.8\"\]"),
        ("[flavors.'g3.8']\nvcpus = 1", "'g3.8': missing gpus, ram_gb, price"),
        ("[flavors.'c1.4']\nprize = 1", r"unknown field prize \(did you mean price\?\)"),
        ("[flavors.'c1.4']\nvcpus = 0", "vcpus = 0; allowed: an integer of at least 1"),
        ("[flavors.'c1.4']\nvcpus = true", "vcpus = True; allowed: an integer"),
        ("[flavors.'c1.4']\nprice = -1", "price = -1; allowed: a number of at least 0"),
        ("[flavors.'c1.4']\nprice = inf", "price = inf; allowed"),
        ("[flavors.'c1.4']\ngpu_model = ''", "gpu_model = ''; allowed: a name"),
    ],
)
def test_a_bad_site_file_is_refused_with_its_path_and_the_reason(tmp_path: Path, text: str, message: str) -> None:
    path = site_file(tmp_path, text)
    with pytest.raises(TaasError, match=message) as caught:
        load_flavors(path)
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message


def test_all_faults_of_a_site_file_are_told_together(tmp_path: Path) -> None:
    path = site_file(tmp_path, "[flavors.'c1.4']\nvcpus = 0\nprice = 'x'\n[flavors.new]\n")
    with pytest.raises(TaasError) as caught:
        load_flavors(path)
    assert len(caught.value.fields["faults"]) == 3


def test_a_missing_site_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TaasError, match=r"cannot read the flavors in .*: No such file"):
        load_flavors(tmp_path / "none.toml")
