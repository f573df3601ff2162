"""hispec-decode: one prompt, a file of prompts, or a conversation."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from hispec import ranks
from hispec.config import parse_assignments
from hispec.decode.options import DecodeOptions, help_text
from hispec.decode.request import SamplingParams
from hispec.errors import ConfigError, DataError, DivergedError, RequestError, command
from hispec.recipes import read_recipe_file, recipe_names

if TYPE_CHECKING:
    from hispec.decode.decoder import Decoder


@command
def main(arguments: list[str]) -> None:
    try:
        _run(arguments)
    except (ConfigError, DataError, RequestError, DivergedError):
        if ranks.is_first():
            raise
        sys.exit(2)  # every rank has met the same mistake, the first one tells of it


def _run(arguments: list[str]) -> None:
    if not arguments or {"-h", "--help", "help"} & set(arguments):
        print(help_text(), end="")
        return
    options = _options(arguments)
    _check(options)
    ranks.join()
    with ranks.first_speaks():
        if options.prompts is not None:
            _file(options)
        elif options.chat:
            _chat(options)
        else:
            _single(options)


def _options(arguments: list[str]) -> DecodeOptions:
    """What was typed, over the recipe that was named, if one was."""
    typed = parse_assignments(arguments, DecodeOptions)
    recipe = typed.get("recipe")
    if recipe is None:
        return DecodeOptions.build(typed)
    names = recipe_names("decode")
    if recipe not in names:
        raise ConfigError(f"recipe {recipe!r} is unknown; there are: {', '.join(names)}")
    return DecodeOptions.build(yaml.safe_load(read_recipe_file(f"decode/{recipe}.yaml")) | typed)


def _check(options: DecodeOptions) -> None:
    """Refuse combinations before anything is loaded."""
    given = [name for name in ("prompt", "prompts", "chat") if getattr(options, name)]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other; give one of them")
    if options.output is not None and options.prompts is None:
        raise ConfigError(f"output={options.output} goes with prompts=FILE; a single prompt is printed")
    if options.prompts is not None and options.output is None:
        raise ConfigError(f"prompts={options.prompts} needs output=FILE")
    if options.n > 1 and options.prompts is None:
        raise ConfigError(f"n={options.n} goes with prompts=FILE output=FILE; a single prompt is streamed once")
    if options.heads == "shared" and not options.exits:
        raise ConfigError("heads=shared needs the exits to read at, such as exits=[4,8]")
    if options.device != "auto" and ranks.count() > 1:
        raise ConfigError(f"device={options.device}: among several processes each takes its own; leave it out")


def _decoder(options: DecodeOptions) -> "Decoder":
    import torch

    from hispec.decode.decoder import Decoder
    from hispec.model import HiSpecModel

    n_ranks = ranks.count()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    device = options.device if options.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):
        raise ConfigError(f"device: {device!r} is not available here; legal: auto, cpu, cuda, cuda:N") from None
    dtype = None if options.dtype == "auto" else getattr(torch, options.dtype)
    if options.heads == "shared" or options.exits == [] and options.base is None and not _is_heads(options.model):
        model = HiSpecModel.from_base(
            options.model, options.exits or (), revision=options.revision, dtype=dtype, device=device, n_ranks=n_ranks
        )
    else:
        model = HiSpecModel.from_pretrained(
            options.model,
            exits=options.exits,
            base=options.base,
            revision=options.revision,
            dtype=dtype,
            device=device,
            n_ranks=n_ranks,
        )
    return Decoder(
        model,
        policy=options.policy,
        lookup=options.lookup,
        max_batch=options.max_batch,
        kv_blocks=options.kv_blocks,
        prefill_chunk=options.prefill_chunk,
        exact=options.exact,
        graphs=options.graphs,
        compile=options.compile,
        gpu_memory_utilization=options.gpu_memory_utilization,
    )


def _is_heads(name: str) -> bool:
    """Whether a local folder holds heads; a plain model may be decoded plainly without any."""
    config = Path(name) / "config.json"
    return config.is_file() and '"hispec"' in config.read_text()


def _params(options: DecodeOptions) -> SamplingParams:
    return SamplingParams.build({name: getattr(options, name) for name in SamplingParams.model_fields})


def _single(options: DecodeOptions) -> None:
    prompt = options.prompt
    if prompt is None:
        if sys.stdin.isatty():
            raise ConfigError("no prompt; give prompt=..., prompts=FILE, chat=true, or text on stdin")
        prompt = ranks.share(sys.stdin.read() if ranks.is_first() else None)
        assert isinstance(prompt, str)
    decoder = _decoder(options)
    tokens: str | list[int] = prompt
    if options.template:
        from hispec.decode.prompts import chat_ids

        tokens = chat_ids(decoder.model.tokenizer, [{"role": "user", "content": prompt}], options.system)
    for piece in decoder.stream(tokens, _params(options)):
        print(piece, end="", flush=True)
    print()
    _print_stats(options, decoder)


def _file(options: DecodeOptions) -> None:
    from hispec.decode.prompts import OutputFile, read_prompts, render

    assert options.prompts is not None and options.output is not None
    rows = read_prompts(Path(options.prompts), _params(options).model_dump())
    output = OutputFile(Path(options.output), options, rows, options.overwrite) if ranks.is_first() else None
    failed = 0
    try:
        missing: list[int] = ranks.share(output and output.missing)
        if output and len(missing) < len(rows):
            print(f"{len(rows) - len(missing)} of {len(rows)} lines are there already", file=sys.stderr)
        if missing:
            decoder = _decoder(options)
            prompts = list(render(rows, decoder.model.tokenizer, options.template, options.system))
            wanted = [prompts[number] for number in missing]
            params = [rows[number].params for number in missing]
            for completion in decoder.generate_as_completed(wanted, params, progress=output is not None):
                if output:
                    output.write(missing[completion.index], completion)
            _print_stats(options, decoder)
            failed = decoder.stats.finish_reasons.get("error", 0)
        if output:
            output.finish()
    finally:
        if output:
            output.close()
    if failed:
        raise DivergedError(
            f"{failed} of {len(rows)} requests failed; their lines in {options.output} say why in 'error'"
        )


def _chat(options: DecodeOptions) -> None:
    from hispec.decode.prompts import chat_ids

    decoder = _decoder(options)
    messages: list[dict[str, str]] = []
    if ranks.is_first():
        print("Talk to the model; an empty line or Ctrl-D ends, Ctrl-C stops an answer.", file=sys.stderr)
    while question := ranks.share(_ask() if ranks.is_first() else None):
        messages.append({"role": "user", "content": question})
        answer = ""
        try:
            for piece in decoder.stream(chat_ids(decoder.model.tokenizer, messages, options.system), _params(options)):
                print(piece, end="", flush=True)
                answer += piece
        except KeyboardInterrupt:
            if ranks.count() > 1:
                raise  # the ranks may have stopped at different tokens
            print(" [stopped]", end="")
        print()
        messages.append({"role": "assistant", "content": answer})
        _print_stats(options, decoder)


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        print()
        return ""


def _print_stats(options: DecodeOptions, decoder: "Decoder") -> None:
    if options.stats and ranks.is_first():
        print(decoder.stats.report(), file=sys.stderr)


if __name__ == "__main__":
    main()
