"""Heads go to the Hub and come back: the real client against a stand-in of the endpoints it calls."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_stand_in import TOKEN, HubStandIn, Repo, Trouble, hub
from huggingface_hub import constants
from train_fixtures import config, model_folder

from hispec import HiSpecModel
from hispec.checkpoint import FILES
from hispec.config import HeadConfig
from hispec.errors import CheckpointError, ConfigError, FileError
from hispec.push import PAUSES, main, run
from hispec.train.loop import train

# The client's own way to upload a file, in which its HTTP library sees an old one.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
LEFT_OUT = ("optimizer.pt", "notes.txt", ".env", "model.safetensors.bak")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Heads as training leaves them, and in the same folder what must not be uploaded."""
    model = HiSpecModel.from_base(model_folder(tmp_path, "llama_gqa"), (2, 4), HeadConfig(kind="mlp"))
    model.save_pretrained(tmp_path / "run" / "heads")
    for name in LEFT_OUT:
        (tmp_path / "run" / "heads" / name).write_text("private")
    return tmp_path / "run" / "heads"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStandIn]:
    """The Hub of this process; the client has read its address from the environment when it was imported."""
    with hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that would have been waited for."""
    seconds: list[float] = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    return seconds


def listed(card: bytes) -> set[str]:
    """The files that a card names."""
    return set(re.findall(r"^\| `(.+?)` \|", card.decode(), re.MULTILINE))


@pytest.mark.slow
def test_the_commands_push_load_by_id_and_decode(folder: Path, tmp_path: Path) -> None:
    """In processes of their own, as a person does it; with the cache alone, too."""
    with hub() as server:
        own = {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home"), "HF_TOKEN": TOKEN}
        own |= {"HF_HUB_DISABLE_XET": "1", "OMP_NUM_THREADS": "1"}

        def command(module: str, *words: str, **environment: str) -> str:
            done = subprocess.run(
                [sys.executable, "-m", module, *words],
                env={**os.environ, **own, **environment},
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, done.stderr
            return done.stdout

        options = ("private=true", "revision=v2", "message=Twice the data")
        where = command("hispec.push", str(folder), "org/heads", *options)
        assert where.startswith(f"{server.url}/org/heads/commit/")
        repo = server.repos["org/heads"]
        assert repo.private and repo.main == {}
        files = repo.branches["v2"]
        card = files["README.md"]
        assert files.keys() == listed(card) == FILES.keys()
        assert all(files[name] == (folder / name).read_bytes() for name in FILES if name != "README.md")
        assert b'from_pretrained("org/heads", revision="v2")' in card and b"model=org/heads revision=v2" in card
        assert any(call.startswith("PUT /lfs/") for call in server.calls)

        words = ("prompt=hi there w40", "max_new_tokens=6")
        here = command("hispec.decode.cli", f"model={folder}", *words)
        assert here.strip()
        fetched = ("model=org/heads", "revision=v2", *words)
        assert command("hispec.decode.cli", *fetched) == here
        n_calls = len(server.calls)
        assert command("hispec.decode.cli", *fetched, HF_HUB_OFFLINE="1") == here
        assert len(server.calls) == n_calls


def test_what_cannot_be_fetched_is_told(server: HubStandIn, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileError, match="heads 'org/nothing': neither a folder here nor a repository"):
        HiSpecModel.from_pretrained("org/nothing")
    run([str(folder), "org/heads", "private=true"])
    with pytest.raises(FileError, match="heads 'org/heads': the repository has no revision 'v9'"):
        HiSpecModel.from_pretrained("org/heads", revision="v9")
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(FileError, match="or it is private"):
        HiSpecModel.from_pretrained("org/heads")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert HiSpecModel.from_pretrained("org/heads").exits == (2, 4)


def test_a_second_push_leaves_nothing_of_the_first_but_what_others_wrote(server: HubStandIn, folder: Path) -> None:
    repo = server.repos["org/heads"] = Repo(private=False)
    repo.main.update({"chat_template.jinja": b"of other heads", "poster.png": b"theirs"})
    (folder / "chat_template.jinja").unlink()
    card = (folder / "README.md").read_text().replace("## Measured", "## Thanks\n\nTo my cat.\n\n## Measured")
    (folder / "README.md").write_text(card)
    for name in ("org/heads", "org/copy", "org/heads"):
        run([str(folder), name])
    assert repo.main.keys() == FILES.keys() - {"chat_template.jinja"} | {"poster.png"}
    assert b"To my cat." in repo.main["README.md"] and b'from_pretrained("org/heads")' in repo.main["README.md"]
    assert b'from_pretrained("org/copy")' in server.repos["org/copy"].main["README.md"]
    assert (folder / "README.md").read_text() == card


@pytest.mark.parametrize(("part", "status"), [("/commit/", 503), ("/repos/create", None), ("/branch/", 429)])
def test_a_network_that_fails_twice_is_tried_again(
    server: HubStandIn, folder: Path, waits: list[float], part: str, status: int | None
) -> None:
    server.troubles.append(Trouble(part, 2, status))
    run([str(folder), "org/heads", "revision=v1"])
    assert waits == list(PAUSES[:2])
    assert server.repos["org/heads"].branches["v1"].keys() == FILES.keys()


def test_an_upload_that_fails_is_repeated_by_the_client(server: HubStandIn, folder: Path, waits: list[float]) -> None:
    server.troubles += [Trouble("/lfs/", 1, 500), Trouble("/preupload/", 1, None)]
    run([str(folder), "org/heads"])
    assert server.repos["org/heads"].main["model.safetensors"] == (folder / "model.safetensors").read_bytes()


def test_a_hub_that_always_fails_loses_nothing(
    server: HubStandIn, folder: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    server.troubles.append(Trouble("/commit/", 99, 500))
    monkeypatch.setattr(sys, "argv", ["hispec-push", str(folder), "org/heads", "private=true", "message=Two words"])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2 and waits == list(PAUSES)
    told = capsys.readouterr()
    line = told.err.strip().splitlines()[-1]
    assert told.out == "" and line.startswith("error: org/heads was not pushed: Server error '500")
    again = f"; nothing is lost, to try again: hispec-push {folder} org/heads private=true 'message=Two words'"
    assert line.endswith(again)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    server.troubles.clear()
    main()
    assert capsys.readouterr().out.startswith(f"{server.url}/org/heads/commit/")


def test_what_will_not_pass_is_told_at_once(
    server: HubStandIn, folder: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.repos["org/open"] = Repo(private=False)
    with pytest.raises(FileError, match="org/open was not pushed: it is there already, and public"):
        run([str(folder), "org/open", "private=true"])
    assert server.repos["org/open"].main == {}
    with monkeypatch.context() as other:
        other.setenv("HF_TOKEN", "hf_wrong")
        with pytest.raises(FileError, match="; log in with `hf auth login`, or set HF_TOKEN"):
            run([str(folder), "org/heads"])
        other.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(FileError, match="org/heads was not pushed: .*offline"):
            run([str(folder), "org/heads"])
    assert waits == [] and "org/heads" not in server.repos


def test_only_whole_heads_are_pushed(server: HubStandIn, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=f"is a run, not a heads folder; give {folder}"):
        run([str(folder.parent), "org/heads"])
    with pytest.raises(CheckpointError, match="has no config.json"):
        run([str(folder / "nothing"), "org/heads"])
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="is damaged"):
        run([str(folder), "org/heads"])
    assert server.calls == []


def test_the_command_teaches_without_torch() -> None:
    code = "import sys; from hispec.push import run; run(['--help']); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "hispec-push FOLDER ORG/NAME" in done.stdout
    assert all(f"\n  {name} " in done.stdout for name in ("private", "revision", "message"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["heads"], "give a folder and a repository"),
        (["heads", "no-org"], "'no-org' is not a repository of the Hub; those are written org/name"),
        (["heads", "org/name", "privat=true"], "did you mean 'private'"),
        (["heads", "org/name", "private=perhaps"], "private: "),
    ],
)
def test_words_that_mean_nothing_are_refused(words: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        run(words)


def test_training_pushes_at_its_end_or_says_how(
    server: HubStandIn, tmp_path: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level("INFO", "hispec")
    export = {"push": "org/tiny", "private": True}
    settings = config(tmp_path, model_folder(tmp_path, "llama_gqa"), head__kind="norm", export=export)
    with monkeypatch.context() as other:
        other.delenv("HF_TOKEN")
        other.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        with pytest.raises(ConfigError, match="export.push=org/tiny needs a Hub token"):
            train(settings)
    server.troubles.append(Trouble("/repos/create", 99, None))
    train(settings)
    heads = tmp_path / "run" / "heads"
    assert caplog.messages[-1].endswith(f"to try again: hispec-push {heads} org/tiny private=true")
    assert (heads / "model.safetensors").is_file()
    server.troubles.clear()
    train(settings)  # nothing is left to train, so this only exports
    assert caplog.messages[-1].startswith(f"heads pushed: {server.url}/org/tiny/commit/")
    repo = server.repos["org/tiny"]
    assert repo.private and repo.main.keys() == listed(repo.main["README.md"]) <= FILES.keys()
    with pytest.raises(ConfigError, match="export.push: .*org/name"):
        config(tmp_path, "tiny", export={"push": "tiny"})
    with pytest.raises(ConfigError, match="give export.push"):
        config(tmp_path, "tiny", export={"private": True})


def test_a_model_in_memory_is_pushed(server: HubStandIn, folder: Path) -> None:
    HiSpecModel.from_pretrained(folder).push_to_hub("org/heads", private=True)
    files = server.repos["org/heads"].main
    assert files.keys() == FILES.keys() and files["model.safetensors"] == (folder / "model.safetensors").read_bytes()
