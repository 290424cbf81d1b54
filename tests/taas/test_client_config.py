from pathlib import Path

import pytest

from taas.client_config import ClientConfig, read_config
from taas.errors import ClientError


def write(tmp_path: Path, text: str, name: str = "client.toml") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


STACK = 'url = "http://127.0.0.1:1/"\nusername = "admin"\npassword = "pw"\nother = 3\n'


def test_the_stacks_file_is_enough(tmp_path: Path) -> None:
    config = read_config({}, files=[tmp_path / "none.toml", write(tmp_path, STACK)])
    assert config == ClientConfig("http://127.0.0.1:1", "admin", "pw")


def test_the_first_file_that_exists_counts(tmp_path: Path) -> None:
    first = write(tmp_path, 'url = "http://first"\ntoken = "t"\n', "a.toml")
    config = read_config({}, files=[first, write(tmp_path, STACK)])
    assert config == ClientConfig("http://first", token="t")


def test_the_environment_goes_before_the_file(tmp_path: Path) -> None:
    environ = {"TAAS_URL": "http://127.0.0.1:1", "TAAS_USERNAME": "me", "TAAS_FLAVORS": "/x/flavors.toml"}
    config = read_config(environ, files=[write(tmp_path, STACK)])
    assert config == ClientConfig("http://127.0.0.1:1", "me", "pw", flavors_file=Path("/x/flavors.toml"))


def test_credentials_of_the_file_are_not_sent_to_another_url(tmp_path: Path) -> None:
    config = read_config({"TAAS_URL": "https://elsewhere"}, files=[write(tmp_path, STACK)])
    assert config == ClientConfig("https://elsewhere")


def test_an_empty_variable_counts_as_not_set(tmp_path: Path) -> None:
    assert read_config({"TAAS_URL": ""}, files=[write(tmp_path, STACK)]).url == "http://127.0.0.1:1"


def test_nothing_that_says_where_airflow_is_names_the_ways(tmp_path: Path) -> None:
    with pytest.raises(ClientError, match=r"TAAS_URL is not set, and there is none of: .*none\.toml.*'taas up'"):
        read_config({}, files=[tmp_path / "none.toml"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("url = ", "is not a TOML file"),
        ("url = 3", "url: allowed: text in quotes"),
        ('url = "airflow"', "got the URL 'airflow'; allowed: http"),
        ('username = "u"', "nothing says where Airflow is"),
    ],
)
def test_a_bad_file_is_one_sentence(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ClientError, match=message):
        read_config({}, files=[write(tmp_path, text)])
