"""How close decoding comes to what the memory of a GPU allows. Random weights of real shapes; no network.

    python benchmarks/gpu.py --dry-run            what would run, with sizes; needs no GPU
    python benchmarks/gpu.py --output gpu.json    all of it: under 8 minutes on one big GPU
    python benchmarks/gpu.py --tiny --device cpu  the same code with tiny shapes, to find its faults

What runs, in this order:

  tests      tests/gpu: kernels, graphs, draft loop, compiled layers and the engine against fp32 on the CPU
  bandwidth  a large copy on the device: bytes read and written per second, the roofline of all that follows
  plain      plain decoding: tokens/s, and bytes read by its steps per second as a share of that bandwidth
  levels     every level at 1, 2, 4, 8 rows: its time, against the share of the full pass's bytes that it reads
  SYNTHETIC  hierarchical decoding with forced acceptance: projected from the levels' times, and really run. The tokens
             are no model's output; it says what heads that are accepted so often would bring, and nothing else.

Goals, printed as met or not: plain decoding at 75% of the bandwidth at batch 1; host overhead below 5% of a step; a
level costs its share of bytes and at most 10% more.

Needs torch, transformers, safetensors, triton, pydantic, huggingface-hub, pyyaml, tqdm; for the tests pytest too. On a
machine without a network take pydantic along: pip download pydantic pydantic-core annotated-types typing-inspection.
"""

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import torch  # noqa: E402
from shapes import SHAPES, TINY, Shape  # noqa: E402
from synthetic import force, parse  # noqa: E402

from hispec.config import HeadConfig  # noqa: E402
from hispec.decode.blocks import BlockPool, blocks_for  # noqa: E402
from hispec.decode.compiled import compile_layers  # noqa: E402
from hispec.decode.engine import Engine  # noqa: E402
from hispec.decode.feed import Part  # noqa: E402
from hispec.decode.hierarchy import make_cache, make_levels  # noqa: E402
from hispec.decode.level import Level  # noqa: E402
from hispec.decode.policy import FixedPolicy  # noqa: E402
from hispec.decode.request import SamplingParams  # noqa: E402
from hispec.decode.runner import Graphed  # noqa: E402
from hispec.decode.sequence import Sequence as Live  # noqa: E402
from hispec.decode.text import TextStream  # noqa: E402
from hispec.heads import Head  # noqa: E402

ROWS = (1, 2, 4, 8)
POLICY = (2, 4)


class Bench:
    """One model on one device, and what was measured of it."""

    def __init__(self, shape: Shape, options: argparse.Namespace) -> None:
        self.shape, self.options = shape, options
        self.cuda = options.device != "cpu"
        self.trunk = shape.build(options.device, options.context + 2 * options.tokens + 64)
        heads = [Head(self.trunk, e, HeadConfig(kind="norm"), slot) for slot, e in enumerate(shape.exits)]
        self.plain, self.levels = make_levels(self.trunk, []), make_levels(self.trunk, heads)
        if options.compile:
            compile_layers(self.trunk.layers)
        per_sequence = blocks_for(options.context + options.tokens + sum(POLICY) + 8)
        self.n_blocks = max(options.batch) * per_sequence
        self.cache = make_cache(self.levels, self.n_blocks)
        # Levels of both lists have the same numbers, so each list has its own graphs.
        self.runners = {id(levels): Graphed(self.cache, self.cuda) for levels in (self.plain, self.levels)}

    def engine(self, levels: list[Level], batch: int, runner: Graphed) -> Engine:
        """An engine with `batch` random prompts, prefilled."""
        pool = BlockPool(self.n_blocks, False)
        engine = Engine(levels, FixedPolicy(len(levels), POLICY), self.cache, pool, batch, 2048, runner)
        params = SamplingParams(max_new_tokens=self.options.tokens, ignore_eos=True)
        no_tokenizer: Any = None
        for number in range(batch):
            generator = torch.Generator().manual_seed(number)
            prompt = torch.randint(5, self.shape.vocab, (self.options.context,), generator=generator).tolist()
            text = TextStream(no_tokenizer)
            engine.add(Live(number, prompt, params, len(levels), self.shape.vocab, (), text))
        while engine.queue or any(sequence.prefilling for sequence in engine.live):
            engine.step()
        return engine

    def decode(self, levels: list[Level], batch: int, runner: Graphed) -> dict[str, Any]:
        """Decode to the end, twice; the second run has all graphs and is timed."""
        for _ in range(2):
            engine = self.engine(levels, batch, runner)
            engine.count_anew()
            seconds = []
            while engine.busy:
                start = time.perf_counter()
                engine.step()
                seconds.append(time.perf_counter() - start)
        return {
            "tokens_per_s": engine.stats.tokens / sum(seconds),
            "tokens": engine.stats.tokens,
            "step_ms": 1e3 * statistics.median(seconds),
            "passes": [level.passes for level in engine.stats.levels],
            "rows": [level.rows for level in engine.stats.levels],
            "acceptance": [level.acceptance for level in engine.stats.levels[1:]],
        }

    @torch.inference_mode()
    def device_ms(self, levels: list[Level], level: Level, batch: int, rows: int) -> float:
        """Time on the device of one pass of a level and its head's verdict, the host far ahead."""
        runner = self.runners[id(levels)]
        width = self.n_blocks // max(self.options.batch)
        hidden = torch.randn(rows, self.trunk.hidden_size, dtype=self.trunk.dtype, device=self.trunk.device)
        entry = hidden if level.index else None
        tables = [list(range(b * width, (b + 1) * width)) for b in range(batch)]
        parts = [Part([7] * rows, self.options.context, table, entry) for table in tables]
        step = runner.graphs.pass_of(level, parts)

        def once() -> None:
            step.replay()
            level.argmax(level.head.logits(step.features_TD))

        return timed(once, self.cuda, 10 if self.cuda else 2)


def timed(run: Callable[[], object], cuda: bool, repeats: int) -> float:
    """Median milliseconds of `run`: on a GPU between events that are queued before the device gets to them."""
    for _ in range(2):
        run()
    if not cuda:
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    torch.cuda.synchronize()
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False))


def bandwidth(device: str, n_bytes: int) -> float:
    """Bytes read and written per second by a copy on the device."""
    source, target = (torch.ones(n_bytes // 4, dtype=torch.float32, device=device) for _ in range(2))
    return 2 * n_bytes / (1e-3 * timed(lambda: target.copy_(source), device != "cpu", 10))


def measure(shape: Shape, options: argparse.Namespace, rate: float) -> dict[str, Any]:
    """Everything about one model, printed as it comes."""
    start = time.perf_counter()
    bench = Bench(shape, options)
    print(
        f"\n{shape.name}: {shape.weight_bytes() / 1e9:.2f} GB, built in {time.perf_counter() - start:.0f} s", flush=True
    )
    result: dict[str, Any] = {"plain": [], "levels": [], "SYNTHETIC": []}
    full: dict[int, float] = {}
    for batch in options.batch:
        row = bench.decode(bench.plain, batch, bench.runners[id(bench.plain)])
        full[batch] = bench.device_ms(bench.plain, bench.plain[0], batch, 1)
        context = batch * (options.context + options.tokens // 2)
        of_rate = shape.pass_bytes(shape.layers, context) / (1e-3 * row["step_ms"]) / rate
        overhead = 1 - full[batch] / row["step_ms"]
        met = goal(of_rate >= 0.75, options) if batch == 1 else ""
        result["plain"].append(row | {"batch": batch, "of_bandwidth": of_rate, "host_overhead": overhead})
        print(
            f"  plain batch {batch:2}: {row['tokens_per_s']:8.1f} tokens/s, step {row['step_ms']:.3f} ms, on the device"
            f" {full[batch]:.3f} ms; {of_rate:.1%} of the bandwidth{met};"
            f" host overhead {overhead:.1%}{goal(overhead < 0.05, options)}",
            flush=True,
        )
    costs: dict[tuple[int, int, int], float] = {}
    for level in bench.levels:
        for batch in options.batch:
            context = batch * options.context
            of_bytes = shape.pass_bytes(level.stop - level.start, context) / shape.pass_bytes(shape.layers, context)
            line = f"  level {level.index} ({level.start}..{level.stop}) batch {batch:2}, {of_bytes:.1%} of the bytes:"
            for rows in ROWS:
                cost = costs[level.index, batch, rows] = bench.device_ms(bench.levels, level, batch, rows)
                ratio = cost / (full[batch] * of_bytes)
                met = goal(ratio <= 1.1, options) if rows == 1 else ""
                line += f"  {rows} rows {cost:.3f} ms = {ratio:.2f}x its share{met}"
                result["levels"].append(
                    {"level": level.index, "batch": batch, "rows": rows, "ms": cost, "ratio": ratio}
                )
            print(line, flush=True)
    forced = force(bench.levels, options.acceptance)
    for batch, plain in zip(options.batch, result["plain"], strict=True):
        row = bench.decode(forced, batch, Graphed(bench.cache, bench.cuda))
        spent = sum(
            passes * costs[level, batch, nearest(rows / max(1, passes) / batch)]
            for level, (passes, rows) in enumerate(zip(row["passes"], row["rows"], strict=True))
        )
        projected = 1e3 * row["tokens"] / spent / plain["tokens_per_s"]
        run = row["tokens_per_s"] / plain["tokens_per_s"]
        result["SYNTHETIC"].append(row | {"batch": batch, "projected": projected, "run": run})
        print(
            f"  SYNTHETIC acceptance {options.acceptance}, batch {batch:2}: projected {projected:.2f}x plain, run"
            f" {run:.2f}x plain (forced acceptance, for sizing only: not a model's output)",
            flush=True,
        )
    return result


def nearest(rows: float) -> int:
    """The measured row count that lies closest."""
    return min(ROWS, key=lambda own: abs(own - rows))


def goal(met: bool, options: argparse.Namespace) -> str:
    if options.tiny:
        return ""
    return " (goal met)" if met else " (GOAL MISSED)"


def plan(shapes: Sequence[Shape], options: argparse.Namespace) -> None:
    """Print what would run."""
    print(f"device {options.device}, {options.context} tokens of context, {options.tokens} generated")
    print("1. python -m pytest tests/gpu" if options.device != "cpu" else "1. no tests: tests/gpu need CUDA")
    print(f"2. bandwidth: a copy of {options.copy / 1e9:.1f} GB")
    for shape in shapes:
        size = shape.weight_bytes() / 1e9
        print(f"3. {shape.name}: weights {size:.2f} GB, exits {list(shape.exits)}, compile={options.compile}")
        for batch in options.batch:
            context = batch * (options.context + options.tokens // 2)
            kv = shape.layers * shape.kv_bytes(batch * (options.context + options.tokens))
            read = shape.pass_bytes(shape.layers, context)
            print(
                f"   plain batch {batch:2}: a step reads {read / 1e9:.2f} GB, KV pool {kv / 1e9:.2f} GB;"
                f" {1e3 * read / 4.3e12:.2f} ms at 4.3 TB/s"
            )
        starts = (0, *shape.exits)
        for index, (begin, end) in enumerate(zip(starts, (*shape.exits, shape.layers), strict=True)):
            read = shape.pass_bytes(end - begin, options.context) / 1e9
            print(f"   level {index}, layers {begin}..{end} and a head: {read:.2f} GB; rows {list(ROWS)}, every batch")
        print(f"   SYNTHETIC acceptance {options.acceptance}, fixed:{POLICY[0]},{POLICY[1]}, batch {options.batch}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="print what would run, and stop")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu together with --tiny")
    parser.add_argument("--models", nargs="*", help=f"of {', '.join(SHAPES)}; all by default")
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 4, 16], help="batch sizes")
    parser.add_argument("--context", type=int, help="tokens of each prompt (512; tiny: 24)")
    parser.add_argument("--tokens", type=int, help="tokens to generate (96; tiny: 12)")
    parser.add_argument("--acceptance", default="synthetic:0.8,0.9", help="what levels 1 and 2 are made to accept")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="no torch.compile of the layers")
    parser.add_argument("--no-tests", dest="tests", action="store_false", help="skip tests/gpu")
    parser.add_argument("--output", help="JSON file for all figures")
    options = parser.parse_args()
    known = TINY if options.tiny else SHAPES
    if options.device == "cpu" and not options.tiny:
        parser.error("--device cpu goes with --tiny: real shapes take hours there")
    if unknown := set(options.models or ()) - set(known):
        parser.error(f"--models {sorted(unknown)}: legal are {sorted(known)}")
    try:
        options.acceptance = parse(options.acceptance)
    except ValueError as error:
        parser.error(str(error))
    options.context = options.context or (24 if options.tiny else 512)
    options.tokens = options.tokens or (12 if options.tiny else 96)
    options.copy = 2**22 if options.tiny else 2**32
    options.compile &= not options.tiny or options.device != "cpu"
    shapes = [known[name] for name in options.models or known]
    if options.dry_run:
        plan(shapes, options)
        return
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error("no CUDA device here; --dry-run shows what would run, --tiny --device cpu runs the code")
    run(shapes, options)


def run(shapes: Sequence[Shape], options: argparse.Namespace) -> None:
    """Measure everything."""
    start = time.perf_counter()
    result: dict[str, Any] = {"options": vars(options), "torch": torch.__version__}
    if options.device != "cpu":
        result["device"] = torch.cuda.get_device_name()
        if options.tests:
            done = subprocess.run([sys.executable, "-m", "pytest", "-q", "tests/gpu"], cwd=ROOT, check=False)
            result["tests"] = "passed" if done.returncode == 0 else "FAILED"
    rate = result["bandwidth"] = bandwidth(options.device, options.copy)
    print(
        f"bandwidth {rate / 1e12:.3f} TB/s (a copy, bytes read and written); tests/gpu {result.get('tests', 'not run')}"
    )
    for shape in shapes:
        result[shape.name] = measure(shape, options, rate)
        if options.device != "cpu":
            gc.collect()
            torch.cuda.empty_cache()
    result["seconds"] = time.perf_counter() - start
    print(f"\n{result['seconds']:.0f} s in all")
    if options.output:
        Path(options.output).write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
