"""Train a small GPT on text, with NumPy or on a GPU: `cuflash.attention_vjp` at work.

    python examples/train_gpt.py
    python examples/train_gpt.py --preset 100m --device gpu --save gpt.safetensors
    python examples/train_gpt.py --resume gpt.safetensors --device gpu
    python examples/train_gpt.py --check-torch

By default the text is the standard library's source beside Python, and the model a tiny one, which
two CPU cores teach in a minute. A run ends with the loss on text that was held out, beside the
entropy of a byte given the one before it. Weights are float32; `--dtype bfloat16` computes with
rounded copies. A run that is resumed gives the same bits as one that was never stopped. Besides
cuflash (with CuPy for a GPU) it needs

    pip install safetensors tqdm matplotlib
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import sys
import sysconfig
import time
import zlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from formulas import Formula
from gpt import DTYPES, GPT, Config, as_numpy, find_module

INSTALL = "pip install safetensors tqdm matplotlib"
HELD_OUT = 0.05  # of the text, its end
WINDOWS = 64  # of held-out text, as long as the context, that the loss is taken of
EVERY = 10  # steps between looks at the loss: each waits for the device
BETA1, BETA2, EPSILON = 0.9, 0.95, 1e-8
ROW = 1024  # weights that a row of a formula has at most

squares = Formula("total = sum(g * g)")
adamw = Formula("""
    d = g * clip
    m = m + rate1 * (d - m)
    v = v + rate2 * (d * d - v)
    p = p - rate * (m / unbias1 / (sqrt(v / unbias2) + epsilon) + decay * p)
    w = p
""")


@dataclass(frozen=True)
class Settings:
    """All that a run's numbers depend on, beside the text and the machine."""

    config: Config
    batch: int
    steps: int
    rate: float  # of learning, after `warmup` steps; it falls to a tenth along a cosine
    warmup: int
    decay: float = 0.1
    clip: float = 1.0  # the gradient's norm at most
    dtype: str = "float32"
    seed: int = 0
    text_checksum: int = 0

    def __post_init__(self):
        for name in ("batch", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} {getattr(self, name)}: give a number above 0")
        if not self.rate > 0:
            raise ValueError(f"--rate {self.rate}: give a number above 0")

    def rate_at(self, step) -> float:
        """The learning rate of one step."""
        if step < self.warmup:
            return self.rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.rate * (0.55 + 0.45 * math.cos(math.pi * done))

    def to_json(self) -> str:
        """The text of which :meth:`from_json` makes the same settings."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text) -> Settings:
        """Settings that a file holds."""
        values = json.loads(text)
        return cls(**values | {"config": Config(**values["config"])})


PRESETS = {
    "tiny": Settings(
        Config(2, width=128, hidden=256, heads=4, key_heads=2, head_dim=32, context=128),
        batch=4, steps=1000, rate=5e-3, warmup=20,
    ),
    "100m": Settings(
        Config(9, width=1024, hidden=2816, heads=8, key_heads=2, head_dim=128, context=2048),
        batch=16, steps=2000, rate=1e-3, warmup=100, dtype="bfloat16",
    ),
}  # fmt: skip


class Trainer:
    """A model in training.

    Parameters
    ----------
    settings : Settings
    text : array of uint8
        Of the array module that works.
    xp : module
        `numpy` or `cupy`.
    state : dict of str to array, optional
        What :func:`load` returns, to go on from.
    deterministic : bool
        As in `cuflash.attention_vjp`.
    """

    def __init__(self, settings, text, xp=np, state=None, *, deterministic=True):
        self.settings, self.xp = settings, xp
        config = settings.config
        self.text, self.held_out = split(text, config.context)
        size = config.parameters
        if state is None:
            state = {"weights": config.initial(settings.seed), "step": np.array(0)}
            state |= {name: np.zeros(size, np.float32) for name in ("m", "v")}
        self.step = int(state["step"])
        self.master, self.m, self.v = (xp.asarray(state[x]) for x in ("weights", "m", "v"))
        self.losses = xp.zeros(settings.steps, np.float32)
        self.losses[: self.step] = xp.asarray(state.get("losses", ()), np.float32)
        self.model = GPT(config, self.master, settings.dtype, deterministic=deterministic)

    def advance(self) -> None:
        """One step: a batch, its gradient, and AdamW. Nothing waits for the device."""
        settings, model = self.settings, self.model
        tokens, targets = self.batch(self.step)
        self.losses[self.step] = model.loss(tokens, targets, backward=True)
        self.step += 1
        self.update(settings.rate_at(self.step - 1))

    def update(self, rate) -> None:
        """AdamW with the model's gradients, shortened where they are too long."""
        settings, xp = self.settings, self.xp
        row = int(np.gcd(self.master.size, ROW))
        arrays = {"g": self.model.gradients, "m": self.m, "v": self.v, "p": self.master}
        if self.model.weights is not self.master:
            arrays["w"] = self.model.weights
        arrays = {name: x.reshape(-1, row) for name, x in arrays.items()}
        totals = xp.empty((self.master.size // row, 1), np.float32)
        squares(g=arrays["g"], total=totals)
        norm = xp.sqrt(totals.sum()) + 1e-6
        clip = xp.minimum(1, settings.clip / norm).astype(np.float32).reshape(1, 1)
        adamw(
            **arrays, clip=clip, rate=rate, decay=settings.decay, epsilon=EPSILON,
            rate1=1 - BETA1, rate2=1 - BETA2,
            unbias1=1 - BETA1**self.step, unbias2=1 - BETA2**self.step,
        )  # fmt: skip

    def batch(self, step):
        """Tokens and those behind them, each (batch, context): the same for the same step."""
        settings = self.settings
        rng = np.random.default_rng([settings.seed, step])
        starts = rng.integers(len(self.text) - settings.config.context, size=settings.batch)
        return self.windows(self.text, starts)

    def windows(self, text, starts):
        """Tokens and those behind them at places of a text."""
        offsets = self.xp.arange(self.settings.config.context + 1)
        tokens = text[self.xp.asarray(starts)[:, None] + offsets].astype(np.int64)
        return tokens[:, :-1], tokens[:, 1:]

    def held_out_loss(self) -> float:
        """The mean loss over windows that are spread over the held-out text."""
        last = len(self.held_out) - self.settings.config.context - 1
        starts = np.linspace(0, last, WINDOWS).astype(int)
        size = self.settings.batch
        parts = [starts[i : i + size] for i in range(0, WINDOWS, size)]
        losses = [
            len(part) * float(self.model.loss(*self.windows(self.held_out, part)))
            for part in parts
        ]  # fmt: skip
        return sum(losses) / WINDOWS

    def state(self) -> dict:
        """What :func:`save` writes and a new trainer goes on from: NumPy arrays."""
        arrays = {"weights": self.master, "m": self.m, "v": self.v}
        arrays["losses"] = self.losses[: self.step]
        return {name: as_numpy(x) for name, x in arrays.items()} | {"step": np.array(self.step)}


class Stopwatch:
    """Seconds between the entries and exits of a `with`, on a GPU by its own clock."""

    def __init__(self, xp):
        self.xp, self._spans = xp, []

    def _now(self):
        if self.xp is np:
            return time.perf_counter()
        event = self.xp.cuda.Event()
        event.record()
        return event

    def __enter__(self):
        self._begin = self._now()

    def __exit__(self, *error):
        self._spans.append((self._begin, self._now()))

    def seconds(self) -> float:
        """The sum so far, which begins again at 0; waits for the device."""
        spans, self._spans = self._spans, []
        if self.xp is np:
            return sum(end - begin for begin, end in spans)
        self.xp.cuda.Device().synchronize()
        return sum(self.xp.cuda.get_elapsed_time(*span) for span in spans) / 1e3


def split(text, context):
    """The text to learn from, and its end, which is held out."""
    held_out = int(HELD_OUT * len(text))
    if held_out < context + 1:
        least = int((context + 1) / HELD_OUT) + 1
        raise ValueError(f"the text has {len(text)} bytes; a context of {context} needs {least}")
    return text[:-held_out], text[-held_out:]


def read_text(path=None) -> np.ndarray:
    """The bytes of a file, or of the standard library's modules, tests left out."""
    if path is not None:
        return np.frombuffer(Path(path).read_bytes(), np.uint8)
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    files = [x for x in root.rglob("*.py") if not left_out & set(x.relative_to(root).parts)]
    if not files:
        raise FileNotFoundError(f"no source in {root}: give a text with --text")
    return np.frombuffer(b"".join(x.read_bytes() for x in sorted(files)), np.uint8)


def pair_entropy(text) -> float:
    """The entropy, in nats, of a byte of the text given the one before it."""
    text = np.asarray(text).astype(np.int64)
    pairs = np.bincount(256 * text[:-1] + text[1:], minlength=256**2).reshape(256, 256)
    before = np.broadcast_to(pairs.sum(axis=1, keepdims=True), pairs.shape)
    there = pairs > 0
    return float(-(pairs[there] * np.log(pairs[there] / before[there])).sum() / pairs.sum())


def save(path, settings, state) -> None:
    """Write a checkpoint: the matrices by name, and what training goes on from."""
    from safetensors.numpy import save_file

    rest = {f"training.{name}": x for name, x in state.items() if name != "weights"}
    arrays = settings.config.views(state["weights"]) | rest
    unfinished = f"{path}.unfinished"
    save_file(arrays, unfinished, metadata={"settings": settings.to_json()})
    os.replace(unfinished, path)


def load(path, *, training=True):
    """Settings and state of a checkpoint; without `training` the weights alone.

    Raises
    ------
    ValueError
        If the file is none of :func:`save`.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            settings = Settings.from_json(file.metadata()["settings"])
            shapes = settings.config.shapes
            weights = [file.get_tensor(name) for name in shapes]
            for x, (name, shape) in zip(weights, shapes.items()):
                if x.shape != shape:
                    raise ValueError(f"{name} has shape {x.shape}, not {shape}")
            state = {"weights": np.concatenate([x.reshape(-1) for x in weights])}
            names = ("step", "m", "v", "losses") if training else ()
            state |= {name: file.get_tensor(f"training.{name}") for name in names}
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no checkpoint of train_gpt.py: {error}") from None
    return settings, state


def train(trainer, until, progress) -> dict:
    """Steps up to `until`, with a bar; tokens per second and the attention's share of the time.

    The first steps compile: the figures are those of the steps behind the first look at the loss.
    """
    settings, watch = trainer.settings, Stopwatch(trainer.xp)
    trainer.model.stopwatch = watch
    tokens = settings.batch * settings.config.context
    attention = seconds = counted = 0.0
    with progress(total=until, initial=trainer.step, unit=" steps") as bar:
        begin, last = time.perf_counter(), trainer.step
        while trainer.step < until:
            trainer.advance()
            if trainer.step % EVERY and trainer.step < until:
                continue
            inside, steps = watch.seconds(), trainer.step - last
            now, last = time.perf_counter(), trainer.step
            if bar.n > bar.initial:
                attention, seconds = attention + inside, seconds + now - begin
                counted += steps * tokens
            rate = steps * tokens / (now - begin)
            loss = float(trainer.losses[trainer.step - 1])
            bar.set_postfix_str(f"loss {loss:.3f}, {rate:,.0f} tokens/s")
            bar.update(steps)
            begin = now
    trainer.model.stopwatch = contextlib.nullcontext()
    if not counted:
        return {}
    return {"tokens per second": counted / seconds, "attention": attention / seconds}


def draw(path, losses, held_out, entropy) -> None:
    """The curve of the loss as a picture."""
    from matplotlib.figure import Figure

    figure = Figure((7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(np.arange(1, len(losses) + 1), losses, linewidth=1, label="loss of a batch")
    axes.axhline(entropy, color="C7", linestyle="--", label="entropy of byte pairs, held out")
    axes.plot(len(losses), held_out, "o", color="C1", label="loss, held out")
    axes.set(xlabel="step", ylabel="nats per byte", ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=150)


def parse(argv):
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description="Train a small GPT on text.")
    parser.add_argument("--preset", choices=PRESETS, help="sizes; tiny by default")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--text", help="a file to learn from; left out, Python's standard library")
    parser.add_argument("--steps", type=int, help="of the whole run, which the schedule knows")
    parser.add_argument("--batch", type=int, help="sequences of a step")
    parser.add_argument("--rate", type=float, help="of learning, at its highest")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="what to compute in")
    parser.add_argument("--seed", type=int, help="of the weights and the batches")
    parser.add_argument("--until", type=int, help="stop behind this step")
    parser.add_argument("--save", help="a file for the checkpoint, written at the end")
    parser.add_argument("--resume", help="a checkpoint to go on from, with its own settings")
    parser.add_argument("--curve", help="a file for the picture of the loss, .png or .svg")
    parser.add_argument(
        "--any-order",
        action="store_true",
        help="let the attention's gradients be added in any order: faster, other bits each time",
    )
    parser.add_argument(
        "--check-torch",
        action="store_true",
        help="compare loss and gradients of a batch, in float32, with PyTorch's, and do no more",
    )
    parser.add_argument(
        "--against-torch",
        type=int,
        metavar="STEPS",
        help="time the same training in PyTorch, in turn, and do no more",
    )
    return parser.parse_args(argv)


def prepared(args) -> Trainer:
    """The trainer that the command line asks for."""
    text = read_text(args.text)
    checksum, state = zlib.crc32(text), None
    names = "preset", "steps", "batch", "rate", "dtype", "seed"
    asked = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.resume:
        if asked:
            raise ValueError(f"--{next(iter(asked))}: a run goes on with its own settings")
        settings, state = load(args.resume)
        if settings.text_checksum != checksum:
            raise ValueError(f"{args.resume} was trained on another text: give that with --text")
    else:
        preset = PRESETS[asked.pop("preset", "tiny")]
        settings = replace(preset, text_checksum=checksum, **asked)
    xp = find_module(args.device)
    return Trainer(settings, xp.asarray(text), xp, state, deterministic=not args.any_order)


def run(args) -> int:
    """Train, evaluate, save and draw."""
    from tqdm import tqdm

    needed = {"safetensors": args.save, "matplotlib": args.curve}
    for package, path in needed.items():  # before the work, not behind it
        if path:
            importlib.import_module(package)
            if not Path(path).absolute().parent.is_dir():
                raise FileNotFoundError(f"{path}: there is no such folder")
    trainer = prepared(args)
    settings = trainer.settings
    until = settings.steps if args.until is None else args.until
    if not trainer.step <= until <= settings.steps:
        raise ValueError(f"--until {until}: give a step from {trainer.step} to {settings.steps}")
    print(
        f"{settings.config.parameters / 1e6:.2f} M parameters in {settings.dtype}, "
        f"{len(trainer.text) / 1e6:.1f} MB of text, "
        f"{settings.batch} x {settings.config.context} tokens a step"
    )
    speed = train(trainer, until, tqdm)
    if speed:
        print("{:,.0f} tokens/s, {:.1%} of the time in attention".format(*speed.values()))
    held_out, state = trainer.held_out_loss(), trainer.state()
    entropy = pair_entropy(as_numpy(trainer.held_out))
    print(f"held-out text: loss {held_out:.3f} nats per byte; entropy of byte pairs {entropy:.3f}")
    if args.save:
        save(args.save, settings, state)
        print(f"saved to {args.save}")
    if args.curve:
        draw(args.curve, state["losses"], held_out, entropy)
    return 0


def main(argv=None) -> int:
    """Run from the command line; returns the exit status."""
    args = parse(argv)
    try:
        if args.check_torch or args.against_torch:
            import gpt_torch  # PyTorch before CuPy, which then finds the libraries it has loaded

            trainer = prepared(args)
            if args.check_torch:
                return gpt_torch.print_check(trainer)
            return gpt_torch.print_race(trainer, args.against_torch)
        return run(args)
    except ModuleNotFoundError as error:
        hint = "" if error.name is None else f" ({INSTALL}; torch for comparisons)"
        print(f"train_gpt: {error}{hint}", file=sys.stderr)
    except (OSError, RuntimeError, TypeError, ValueError) as error:
        print(f"train_gpt: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
