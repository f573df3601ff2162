"""hispec-push: a heads folder to the Hub. Nothing heavy is imported before it is needed."""

import logging
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from pydantic import Field

from hispec.config import Config, check_repo_id, field_help, parse_assignments
from hispec.errors import ConfigError, FileError, command, first_line

log = logging.getLogger("hispec")
# Seconds before the next try; the client has waited within each try already.
PAUSES = (2, 5, 15)

HELP = """\
hispec-push FOLDER ORG/NAME [key=value ...]   upload trained heads to the Hugging Face Hub

  FOLDER     heads that hispec-train exported, such as runs/llama2-7b/heads
  ORG/NAME   the repository; it is created if it is not there

Only what belongs to the heads is uploaded (weights, settings, chat template, model card), never a run's checkpoints.
Log in first: `hf auth login`, or set HF_TOKEN to a token that may write.

examples
  hispec-push runs/llama2-7b/heads my-org/llama2-7b-hispec
  hispec-push runs/llama2-7b/heads my-org/llama2-7b-hispec private=true revision=v2 message="Twice the data"

options
"""


class PushOptions(Config):
    """How heads are put on the Hub."""

    private: bool | None = None
    """Who can see a repository that is created: null is as the account has it. One that is there must be as asked."""
    revision: str | None = Field(default=None, min_length=1)
    """Branch to upload to, created if it is not there; null is main."""
    message: str = Field(default="Upload hispec heads", min_length=1)
    """Of the commit."""


def push(folder: Path, repo_id: str, options: PushOptions | None = None, token: str | None = None) -> str:
    """Upload a heads folder, again if the network fails; returns the address of the commit.

    Raises:
        ConfigError: not a name for a repository. CheckpointError: not a heads folder, or damaged.
        FileError: the Hub could not be reached, or did not take it. Nothing here has changed.
    """
    from hispec import checkpoint

    options = options or PushOptions()
    check_repo_id(repo_id)
    checkpoint.check_whole(folder)
    for pause in (*PAUSES, None):
        try:
            return _upload(folder, repo_id, options, token)
        except FileError:
            raise
        except Exception as error:  # the client's own, its HTTP library's, its storage's
            if pause is None or not _may_pass(error):
                raise FileError(f"{repo_id} was not pushed: {_why(error)}{_advice(error)}") from None
            log.warning("%s; trying again in %d seconds", _why(error), pause)
            time.sleep(pause)
    raise AssertionError


def check_login(repo_id: str) -> None:
    """Look for what a push will need, before hours of work. Raises ConfigError."""
    from huggingface_hub import get_token

    if get_token() is None:
        raise ConfigError(
            f"export.push={repo_id} needs a Hub token, and there is none; log in with `hf auth login`, set HF_TOKEN,"
            " or leave it out and use hispec-push afterwards"
        )


def again(folder: Path, repo_id: str, options: PushOptions) -> str:
    """The command that pushes this."""
    given = options.model_dump(exclude_defaults=True)
    words = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in given.items()]
    return shlex.join(["hispec-push", str(folder), repo_id, *words])


def _upload(folder: Path, repo_id: str, options: PushOptions, token: str | None) -> str:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    from hispec.card import readdress
    from hispec.checkpoint import CARD, FILES

    api = HfApi(token=token)
    api.create_repo(repo_id, private=options.private, exist_ok=True)
    if options.revision is not None:
        api.create_branch(repo_id, branch=options.revision, exist_ok=True)
    there = api.model_info(repo_id, revision=options.revision)
    if options.private is not None and there.private is not options.private:
        kind = "private" if there.private else "public"
        raise FileError(f"{repo_id} was not pushed: it is there already, and {kind}; change that in its settings first")
    operations: list[Any] = []
    stale = {sibling.rfilename for sibling in there.siblings or ()} & FILES.keys()
    for name in FILES:
        path = folder / name
        if path.is_file():
            card = name == CARD
            content = readdress(path.read_text(), repo_id, options.revision).encode() if card else str(path)
            operations.append(CommitOperationAdd(name, content))
        elif name in stale:  # of other heads that lay there before, and would be taken for a part of these
            operations.append(CommitOperationDelete(name))
    commit = api.create_commit(
        repo_id, operations=operations, commit_message=options.message, revision=options.revision
    )
    return str(commit.commit_url)


def _why(error: BaseException) -> str:
    """What went wrong; the client sometimes says only where, and has the reason as the cause."""
    told = first_line(error)
    cause = "" if _status(error) or error.__cause__ is None else _why(error.__cause__)
    return told if cause in told else f"{told} {cause}"


def _may_pass(error: BaseException) -> bool:
    """Whether trying again may help: not where the Hub, or the client itself, has said no."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    status = _status(error) or _status(error.__cause__)
    if status:
        return status in (408, 429) or status >= 500
    return not isinstance(error, ValueError | OfflineModeIsEnabled)


def _advice(error: BaseException) -> str:
    if _status(error) in (401, 403):
        return "; log in with `hf auth login`, or set HF_TOKEN to a token that may write there"
    return ""


def _status(error: BaseException | None) -> int:
    """Of the answer that the Hub gave, 0 where it gave none."""
    return int(getattr(getattr(error, "response", None), "status_code", 0))


def run(argv: list[str]) -> None:
    """The command, from its words.

    Raises:
        HiSpecError: the user's own mistakes, and a Hub that cannot be reached.
    """
    if not argv or {"-h", "--help", "help"} & set(argv):
        print(HELP + field_help(PushOptions), end="")
        return
    if len(argv) < 2 or "=" in argv[0] or "=" in argv[1]:
        raise ConfigError("give a folder and a repository: hispec-push FOLDER ORG/NAME, see --help")
    folder, repo_id = Path(argv[0]), argv[1]
    options = PushOptions.build(parse_assignments(argv[2:], PushOptions))
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    try:
        print(push(folder, repo_id, options))
    except FileError as error:
        raise FileError(f"{error}; nothing is lost, to try again: {again(folder, repo_id, options)}") from None


main = command(run)

if __name__ == "__main__":
    main()
