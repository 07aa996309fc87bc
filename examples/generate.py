"""Let a GPT of train_gpt.py write on, several prompts at once: cuflash's caches at work.

    python examples/generate.py gpt.safetensors "def main(" "import " --tokens 200
    python examples/generate.py gpt.safetensors "class " --device gpu --dtype bfloat16 --top-p 0.9

Keys and values lie in pages: `cuflash.append_kv` writes them, `cuflash.attention` reads them
through a table. Prompts may have any lengths. On a GPU a step, from the bytes before to those
behind, is one CUDA graph, captured once.

What follows a prompt is the same bits whatever is written beside it. A prompt is read by itself; in
a step each sequence's products with the matrices are sums of its own, and `split_keys` has its keys
worked on in the same spans in any batch and any cache. Prompt number i is drawn for with seed
`--seed` + i. Besides cuflash (with CuPy for a GPU) it needs

    pip install safetensors
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time

import numpy as np
from formulas import Formula
from gpt import DTYPES, GPT, VOCABULARY, array_module, as_numpy, find_module

import cuflash

PAGE = 64  # positions
SPAN = 256  # keys that are worked on together, for `split_keys`
WARM_UP = 3  # tokens that a prompt's logits and the steps that compile and capture give

row_product = Formula("y = sum(x * w)")
probabilities = Formula("""
    top = max(x)
    total = sum(exp((x - top) / temperature))
    p = exp((x - top) / temperature) / total
""")
# How much is likelier than each byte; of two that are as likely the first counts as likelier.
likelier = Formula("before = sum(where((other > p) | ((other == p) & (column < byte)), other, 0))")
# Bytes are taken, likeliest first, until top_p is reached; `uniform` says where among these.
draw = Formula("""
    limit = max(where((before < top_p) & (p > 0), before + p, 0))
    place = max(where((before <= uniform * limit) & (before < top_p) & (p > 0), before, -1))
    token = max(where((before == place) & (p > 0), byte, -1))
""")
likeliest = Formula("""
    top = max(x)
    token = max(where(x == top, byte, -1))
""")


class CachedGPT(GPT):
    """The model with a cache of keys and values in pages.

    Parameters
    ----------
    config, flat, dtype
        As in `GPT`.
    positions : sequence of int
        How many tokens each sequence has room for.
    """

    def __init__(self, config, flat, dtype, positions):
        super().__init__(config, flat, dtype)
        xp, pages = self.xp, [-(-x // PAGE) for x in positions]
        pool = config.layers, sum(pages), config.key_heads, PAGE, config.head_dim
        self.k_pool, self.v_pool = xp.zeros(pool, self.dtype), xp.zeros(pool, self.dtype)
        # Page after page goes to the sequences in turn, as if all had grown together.
        turns = sorted((page, b) for b, count in enumerate(pages) for page in range(count))
        table = np.zeros((len(pages), max(pages)), np.int32)
        for number, (page, b) in enumerate(turns):
            table[b, page] = number
        self.table = xp.asarray(table)
        self.lengths = xp.zeros(len(pages), np.int32)
        heads = (len(pages), config.heads, 1, config.head_dim)
        self.out = self.empty(heads)
        self.lengths_behind = xp.ones_like(self.lengths)
        self.workspace = None
        if xp is not np:
            pools = self.k_pool[0], self.v_pool[0]
            plan = cuflash.plan(self.out, *pools, **self._options(slice(None)))
            self.workspace = xp.empty(plan.workspace_bytes, np.uint8)

    def read(self, b, prompt):
        """The logits behind the prompt of sequence b, an array of shape (1, N)."""
        self._rows, self._given = slice(b, b + 1), {}
        self.lengths_behind[b] = prompt.shape[1]
        logits, _ = self.forward(prompt)
        self.lengths[b] = prompt.shape[1]
        return logits[-1:]

    def step(self, tokens):
        """The logits behind one more token of each sequence, an array of shape (B, 1)."""
        self._rows, self._given = slice(None), {"out": self.out, "workspace": self.workspace}
        self.lengths_behind[...] = self.lengths + 1
        logits, _ = self.forward(tokens, self.rotary(self.lengths[:, None]))
        self.lengths += 1
        return logits

    def forward(self, tokens, table=None):
        """As of `GPT`; there are no gradients."""
        self._one_each = tokens.shape[1] == 1
        return super().forward(tokens, table)

    def product(self, name, x):
        """`x @ w.T`: of one token each, by rows, with the same bits for any number of them."""
        if not self._one_each:
            return super().product(name, x)
        w = self.w[name]
        if self.xp is np:
            return np.stack([w @ row for row in x]), None
        y = self.empty((len(x), len(w)))
        row_product(x=x, w=w[:, None], y=y.T[..., None])
        return y, None

    def attention(self, i, q, k, v):
        """Put keys and values behind those in the cache, and attend to all."""
        k_pool, v_pool, options = self.k_pool[i], self.v_pool[i], self._options(self._rows)
        cuflash.append_kv(
            k_pool, v_pool, k, v, self.lengths[self._rows], page_table=options["page_table"]
        )
        return cuflash.attention(q, k_pool, v_pool, **options, **self._given), None

    def _options(self, rows):
        return {
            "page_table": self.table[rows],
            "kv_lengths": self.lengths_behind[rows],
            "causal": True,
            "enable_gqa": True,
            "split_keys": SPAN,
        }


class Sampler:
    """Draws the next byte of each row of logits.

    Parameters
    ----------
    xp : module
        `numpy` or `cupy`.
    temperature : float
        Logits are divided by it; 0 takes the likeliest byte.
    top_p : float
        From the likeliest bytes that together have this probability.
    """

    def __init__(self, xp, temperature=1.0, top_p=1.0):
        if not temperature >= 0:
            raise ValueError(f"--temperature {temperature}: give a number, 0 or above")
        if not 0 < top_p <= 1:
            raise ValueError(f"--top-p {top_p}: give a number above 0 and up to 1")
        self.xp, self.temperature, self.top_p = xp, temperature, top_p
        self.byte = xp.arange(VOCABULARY)

    def __call__(self, logits, uniform):
        """Tokens, shape (B, 1), of logits (B, VOCABULARY) and numbers from 0 to 1 (B, 1)."""
        token = self.xp.empty((len(logits), 1), np.int64)
        if self.temperature == 0:
            likeliest(x=logits, byte=self.byte, token=token)
            return token
        p = self.xp.empty(logits.shape, uniform.dtype)
        before = self.xp.empty_like(p)
        probabilities(x=logits, temperature=self.temperature, p=p)
        likelier(
            other=p[:, None], p=p[..., None], column=self.byte, byte=self.byte[:, None],
            before=before[..., None],
        )  # fmt: skip
        draw(p=p, before=before, byte=self.byte, top_p=self.top_p, uniform=uniform, token=token)
        return token


def uniforms(xp, seeds, tokens):
    """Numbers from 0 to 1, shape (B, tokens): a row depends on its seed alone."""
    rows = [np.random.default_rng(seed).random(tokens, np.float32) for seed in seeds]
    return xp.asarray(np.stack(rows))


def write(config, flat, prompts, tokens, *, seeds, dtype="float32", sampler=None, graph=True):
    """What the model writes behind the prompts.

    Parameters
    ----------
    config : Config
    flat : array
        The weights, of NumPy or CuPy.
    prompts : sequence of bytes
    tokens : int
        How many to write behind each.
    seeds : sequence of int
        Of each prompt.
    dtype : str
    sampler : Sampler, optional
    graph : bool
        On a GPU, capture a step and launch it as one.

    Returns
    -------
    texts : list of bytes
    seconds : float
        That the steps from number `WARM_UP` on took.
    """
    xp = array_module(flat)
    sampler = sampler or Sampler(xp)
    with own_stream(xp):
        model = CachedGPT(config, flat, dtype, [len(prompt) + tokens for prompt in prompts])
        numbers, written = uniforms(xp, seeds, tokens), xp.empty((len(prompts), tokens), np.int64)
        uniform = numbers[:, :1].copy()
        logits = [model.read(b, as_tokens(xp, prompt)) for b, prompt in enumerate(prompts)]
        current = sampler(xp.concatenate(logits), uniform)
        written[:, :1] = current

        def step():
            current[...] = sampler(model.step(current), uniform)

        steps = Captured(xp, step) if graph and xp is not np else step
        begin = time.perf_counter()
        for t in range(1, tokens):
            if t == WARM_UP:
                wait(xp)
                begin = time.perf_counter()
            uniform[...] = numbers[:, t : t + 1]
            steps()
            written[:, t : t + 1] = current
        wait(xp)
        seconds = time.perf_counter() - begin
    return [bytes(row) for row in as_numpy(written).astype(np.uint8)], seconds


class Captured:
    """A function of arrays on a GPU, called as it is until it can be captured, then as a graph.

    The graph's memory comes from a pool of its own, where nobody else takes what it works with.
    When a call finds there all that it takes, the next one can be captured: it takes the same.
    """

    def __init__(self, cupy, function):
        self._cuda, self._function = cupy.cuda, function
        self._pool, self._graph = cupy.cuda.MemoryPool(), None

    def __call__(self) -> None:
        """Call the function once, on the current stream."""
        stream = self._cuda.get_current_stream()
        if self._graph is not None:
            self._graph.launch(stream)
            return
        had = self._pool.total_bytes()
        with self._cuda.using_allocator(self._pool.malloc):
            self._function()
            if self._pool.total_bytes() > had:
                return
            stream.begin_capture()
            try:
                self._function()  # is written down, not run
            finally:
                self._graph = stream.end_capture()


@contextlib.contextmanager
def own_stream(xp):
    """On a GPU, make a new stream the current one; what it was told is done at the end."""
    if xp is np:
        yield
        return
    xp.cuda.Device().synchronize()
    with xp.cuda.Stream(non_blocking=True) as stream:
        yield
        stream.synchronize()


def wait(xp):
    """Until the current stream has done what it was told."""
    if xp is not np:
        xp.cuda.get_current_stream().synchronize()


def write_without_cache(config, flat, prompt, tokens, *, seed, dtype="float32", sampler=None):
    """What :func:`write` writes behind one prompt, everything computed again for each byte."""
    model = GPT(config, flat, dtype)
    sampler = sampler or Sampler(model.xp)
    numbers = uniforms(model.xp, [seed], tokens)
    text = as_tokens(model.xp, prompt)
    for t in range(tokens):
        logits, _ = model.forward(text)
        text = model.xp.concatenate([text, sampler(logits[-1:], numbers[:, t : t + 1])], axis=1)
    return bytes(as_numpy(text[0, len(prompt) :]).astype(np.uint8))


def as_tokens(xp, prompt):
    """The bytes of a prompt as an array of shape (1, N)."""
    if not prompt:
        raise ValueError("a prompt is empty: give a byte or more to write behind")
    return xp.asarray(np.frombuffer(prompt, np.uint8).astype(np.int64)[None])


def parse(argv):
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description="Write on, behind prompts.")
    parser.add_argument("checkpoint", help="a file that train_gpt.py saved")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT")
    parser.add_argument("--tokens", type=int, default=200, help="bytes to write behind each")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest byte")
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=0, help="of the first prompt")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="float32")
    parser.add_argument("--no-graph", action="store_true", help="launch each kernel of a step")
    parser.add_argument(
        "--no-cache", action="store_true", help="compute everything again for each byte: slow"
    )
    return parser.parse_args(argv)


def run(args) -> None:
    """Write, and print the texts and the rate."""
    from train_gpt import load

    if args.tokens < 1:
        raise ValueError(f"--tokens {args.tokens}: give a number above 0")
    settings, state = load(args.checkpoint, training=False)
    xp = find_module(args.device)
    sampler, flat = Sampler(xp, args.temperature, args.top_p), xp.asarray(state["weights"])
    prompts = [prompt.encode() for prompt in args.prompts]
    seeds = [args.seed + i for i in range(len(prompts))]
    options = {"dtype": args.dtype, "sampler": sampler}
    if args.no_cache:
        texts = [
            write_without_cache(settings.config, flat, prompt, args.tokens, seed=seed, **options)
            for prompt, seed in zip(prompts, seeds)
        ]
    else:
        options["graph"] = not args.no_graph
        texts, seconds = write(settings.config, flat, prompts, args.tokens, seeds=seeds, **options)
    for prompt, text in zip(prompts, texts):
        print(f"--- {prompt.decode()!r}\n{(prompt + text).decode(errors='replace')}")
    if not args.no_cache and args.tokens > WARM_UP:
        written = len(prompts) * (args.tokens - WARM_UP)
        print(f"--- {written / seconds:,.0f} bytes/s of {len(prompts)} sequences", file=sys.stderr)


def main(argv=None) -> int:
    """Run from the command line; returns the exit status."""
    args = parse(argv)
    try:
        run(args)
    except (OSError, ModuleNotFoundError, RuntimeError, TypeError, ValueError) as error:
        print(f"generate: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
