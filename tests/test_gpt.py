"""The GPT of examples/: its gradients, its training, and what it writes."""

import importlib
import os
import re
import types
from pathlib import Path

import numpy as np
import pytest

import cuflash

# Of a build of PyTorch for an earlier NumPy; it gets NumPy's arrays by DLPack.
pytestmark = pytest.mark.filterwarnings("ignore:Failed to initialize NumPy")


def need(package, variable="CUFLASH_REQUIRE_EXAMPLE"):
    """Skip, or fail where the variable says so, unless a package is here."""
    try:
        importlib.import_module(package)
    except ModuleNotFoundError as error:
        if os.environ.get(variable) == "1":
            pytest.fail(str(error))
        pytest.skip(f"{error}: pip install {package}")


@pytest.fixture(scope="module", autouse=True)
def modules():
    """The example's modules, by name."""
    for package in ("safetensors", "tqdm", "matplotlib"):
        need(package)
    names = "gpt", "train_gpt", "generate"
    return types.SimpleNamespace(**{name: importlib.import_module(name) for name in names})


@pytest.fixture
def gpt(modules):
    return modules.gpt


@pytest.fixture
def train(modules):
    return modules.train_gpt


@pytest.fixture
def generate(modules):
    return modules.generate


SIZES = {
    "layers": 2, "width": 64, "hidden": 96, "heads": 4, "key_heads": 2, "head_dim": 16,
    "context": 20,
}  # fmt: skip


@pytest.fixture
def config(gpt):
    return gpt.Config(**SIZES)


@pytest.fixture
def text(tmp_path):
    """A file with something to learn."""
    path = tmp_path / "text"
    path.write_bytes(b"".join(b"%d is %d squared; " % (i * i, i) for i in range(600)))
    return path


@pytest.fixture
def cupy():
    """On a machine with a GPU, of tests marked gpu."""
    return importlib.import_module("cupy")


def tokens_of(config, batch=3, seed=1):
    tokens = np.random.default_rng(seed).integers(0, 256, (batch, config.context + 1))
    return tokens[:, :-1], tokens[:, 1:]


# The model


def test_gradients_equal_finite_differences(gpt, config):
    flat = config.initial(0).astype(np.float64)
    batch = tokens_of(config)
    model = gpt.GPT(config, flat, "float64")
    model.loss(*batch, backward=True)
    rng = np.random.default_rng(2)
    for name, shape in config.shapes.items():
        step = np.zeros_like(flat)
        # Partly along the gradient, lest the difference drowns in the losses' roundings.
        parts = rng.standard_normal(shape), model.g[name]
        direction = sum(x / np.linalg.norm(x) for x in parts)
        config.views(step)[name][...] = direction
        after, before = (
            gpt.GPT(config, flat + h * step, "float64").loss(*batch) for h in (1e-4, -1e-4)
        )
        slope = np.vdot(model.g[name], direction)
        np.testing.assert_allclose((after - before) / 2e-4, slope, rtol=1e-5, err_msg=name)


def test_rotary_positions_are_relative(gpt, config):
    """The product of a query and a key depends on the distance of their positions alone."""
    model = gpt.GPT(config, config.initial(0).astype(np.float64), "float64")
    q, k = np.random.default_rng(0).standard_normal((2, 1, 1, 1, 16))

    def score(i, j):
        turned = []
        for x, position in ((q, i), (k, j)):
            y = np.empty_like(x)
            gpt.turn([x], [y], *model.rotary(np.array([position])))
            turned.append(y)
        return np.vdot(*turned)

    np.testing.assert_allclose(score(3, 1), score(1003, 1001), rtol=1e-10)
    assert abs(score(3, 1) - score(3, 2)) > 1e-3


def test_a_token_sees_those_before_it_alone(gpt, config):
    model = gpt.GPT(config, config.initial(0))
    tokens, _ = tokens_of(config, batch=1)
    changed = tokens.copy()
    changed[0, 12] ^= 1
    logits, others = (model.forward(x)[0].copy() for x in (tokens, changed))
    np.testing.assert_array_equal(logits[:12], others[:12])
    assert (logits[12:] != others[12:]).any(axis=1).all()


def test_gradients_equal_those_of_torch(train, text, capsys):
    need("torch", "CUFLASH_REQUIRE_TORCH")
    assert train.main(["--check-torch", "--text", str(text)]) == 0
    printed = capsys.readouterr().out
    assert len(re.findall(r"^gradient of \S+ +\d\.\de-\d\d$", printed, re.MULTILINE)) == 10


def test_torch_notices_a_wrong_gradient(train, text, monkeypatch, capsys):
    need("torch", "CUFLASH_REQUIRE_TORCH")
    original = cuflash.attention_vjp

    def wrong(*operands, **options):
        out, vjp = original(*operands, **options)
        return out, lambda dout: [1.001 * x for x in vjp(dout)]

    monkeypatch.setattr(cuflash, "attention_vjp", wrong)
    assert train.main(["--check-torch", "--text", str(text)]) == 1
    assert re.search(r"^gradient of 1\.qkv +1\.0e-03$", capsys.readouterr().out, re.MULTILINE)


def test_the_ten_lines_of_the_page(gpt):
    """docs/rotary.md: its function turns as the model does, and its gradients are right."""
    page = (Path(__file__).parents[1] / "docs" / "rotary.md").read_text()
    names = {}
    exec(re.search(r"```python\n(.*?)```", page, re.DOTALL)[1], names)
    q, positions = names["q"], names["positions"]
    wanted = np.empty_like(q)
    model = gpt.GPT(gpt.Config(**SIZES | {"head_dim": 64}), np.zeros(200_000, np.float32))
    gpt.turn([q.swapaxes(1, 2)], [wanted.swapaxes(1, 2)], *model.rotary(positions))
    np.testing.assert_allclose(names["rotated"](q, positions), wanted, atol=1e-6)

    def loss(q):
        turned = [names["rotated"](x.astype(float), positions) for x in (q, names["k"])]
        return cuflash.attention(*turned, names["v"].astype(float), causal=True).sum()

    step = np.random.default_rng(1).standard_normal(q.shape)
    difference = (loss(q + 1e-5 * step) - loss(q - 1e-5 * step)) / 2e-5
    np.testing.assert_allclose(np.vdot(names["dq"], step), difference, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers=0: give a whole number above 0"),
        ({"heads": 3}, "heads=3 is no multiple of key_heads=2"),
        ({"width": 40}, "width=40 is no multiple of 32"),
        ({"head_dim": 9}, "head_dim=9 must be even, and a multiple of 32 with heads=4 of it"),
    ],
)
def test_sizes_that_make_no_model(change, message, gpt):
    with pytest.raises(ValueError, match=message):
        gpt.Config(**SIZES | change)


def test_types_that_are_not_there(gpt, config):
    with pytest.raises(ValueError, match="dtype='float8': give one of float32, float64, bfloat16"):
        gpt.GPT(config, config.initial(0), "float8")


# Training


def trainer(train, config, text, **settings):
    values = {"batch": 2, "steps": 6, "rate": 1e-2, "warmup": 2}
    return train.Trainer(train.Settings(config, **values | settings), train.read_text(text))


def test_it_learns_and_writes_on(train, generate, tmp_path, capsys):
    """More than pairs of bytes tell; then the same text whatever it is written beside."""
    saved, curve = tmp_path / "gpt.safetensors", tmp_path / "curve.png"
    asked = ["--steps", "160", "--save", str(saved), "--curve", str(curve)]
    assert train.main(asked) == 0
    printed = capsys.readouterr()
    loss, entropy = re.search(
        r"loss (\S+) nats per byte; entropy of byte pairs (\S+)", printed.out
    ).groups()
    assert float(loss) < float(entropy)
    assert re.search(r"[\d,]+ tokens/s, \d+\.\d% of the time in attention", printed.out)
    assert re.search(r"160/160 .* loss \d\.\d{3}, [\d,]+ tokens/s", printed.err)
    assert curve.read_bytes().startswith(b"\x89PNG")

    prompts = ["import ", "    def __init__(self, ", "x"]
    written = ["--tokens", "80", "--seed", "5"]

    def texts(*arguments):
        assert generate.main([str(saved), *arguments]) == 0
        out = capsys.readouterr().out
        found = re.split(r"^--- '(.*)'\n", out, flags=re.MULTILINE)[1:]
        return dict(zip(found[::2], found[1::2]))

    together = texts(*prompts, *written)
    assert list(together) == prompts
    assert all(text.startswith(prompt) for prompt, text in together.items())
    assert texts(*prompts, *written, "--no-cache") == together
    assert texts(prompts[1], *written[:-1], "6") == {prompts[1]: together[prompts[1]]}
    assert texts(*prompts, *written[:-1], "99") != together


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_resumed_it_gives_the_same_bits(dtype, train, config, text, tmp_path):
    whole = trainer(train, config, text, dtype=dtype)
    for _ in range(4):
        whole.advance()
    first = trainer(train, config, text, dtype=dtype)
    for _ in range(2):
        first.advance()
    path = tmp_path / "half"
    train.save(path, first.settings, first.state())
    settings, state = train.load(path)
    second = train.Trainer(settings, train.read_text(text), state=state)
    for _ in range(2):
        second.advance()
    for name, wanted in whole.state().items():
        np.testing.assert_array_equal(second.state()[name], wanted, err_msg=name)
    np.testing.assert_array_equal(second.model.weights, whole.model.weights)
    np.testing.assert_array_equal(whole.model.weights, whole.master.astype(whole.model.dtype))
    assert second.held_out_loss() == whole.held_out_loss()


def test_the_command_line_resumes(train, text, tmp_path, capsys):
    path, again = str(tmp_path / "a"), str(tmp_path / "b")
    asked = ["--text", str(text), "--steps", "4", "--batch", "2", "--seed", "3"]
    assert train.main([*asked, "--save", path]) == 0
    assert train.main([*asked, "--until", "2", "--save", again]) == 0
    assert train.main(["--text", str(text), "--resume", again, "--save", again]) == 0
    (settings, state), (_, other) = train.load(path), train.load(again)
    assert (settings.steps, settings.batch, settings.seed) == (4, 2, 3)
    for name, wanted in state.items():
        np.testing.assert_array_equal(other[name], wanted, err_msg=name)


def test_adamw_as_it_is_defined(train, config, text):
    mine = trainer(train, config, text, decay=0.3, clip=0.01)
    p, m, v = (mine.state()[name].astype(float) for name in ("weights", "m", "v"))
    for step in range(3):
        mine.advance()
        g = mine.model.gradients.astype(float)
        g *= min(1, 0.01 / np.linalg.norm(g))
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        change = m / (1 - 0.9 ** (step + 1)) / (np.sqrt(v / (1 - 0.95 ** (step + 1))) + 1e-8)
        p -= mine.settings.rate_at(step) * (change + 0.3 * p)
    np.testing.assert_allclose(mine.master, p, atol=2e-6)


def test_the_rate_rises_and_falls(train):
    settings = train.PRESETS["tiny"]
    rates = [settings.rate_at(step) for step in range(settings.steps)]
    assert rates[0] == settings.rate / settings.warmup
    assert max(rates) == rates[settings.warmup] == settings.rate
    assert np.all(np.diff(rates[settings.warmup :]) < 0)
    np.testing.assert_allclose(rates[-1], 0.1 * settings.rate, rtol=1e-3)


def test_the_entropy_of_pairs(train):
    assert train.pair_entropy(np.frombuffer(b"abababab", np.uint8)) == 0
    mixed = np.random.default_rng(0).integers(0, 4, 100_000, dtype=np.uint8)
    np.testing.assert_allclose(train.pair_entropy(mixed), np.log(4), rtol=1e-3)


def test_the_preset_has_about_100_million_weights(train):
    assert 95e6 < train.PRESETS["100m"].config.parameters < 105e6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--text", "nowhere"], "No such file"),
        (["--text", "{short}"], "the text has 100 bytes; a context of 128 needs 2581"),
        (["--batch", "0"], "--batch 0: give a number above 0"),
        (["--steps", "-3"], "--steps -3: give a number above 0"),
        (["--rate", "nan"], "--rate nan: give a number above 0"),
        (["--resume", "{short}"], "is no checkpoint of train_gpt.py"),
        (["--resume", "nowhere"], "nowhere"),
        (["--text", "{other}", "--resume", "{saved}"], "was trained on another text"),
        (
            ["--resume", "{saved}", "--seed", "1"],
            "--seed: a run goes on with its own settings",
        ),
        (["--until", "2000"], "--until 2000: give a step from 0 to 1000"),
        (["--save", "{short}/there"], "short/there: there is no such folder"),
    ],
)
def test_bad_arguments(arguments, message, train, config, text, tmp_path, capsys):
    paths = {name: tmp_path / name for name in ("short", "other", "saved")}
    paths["short"].write_bytes(b"x" * 100)
    paths["other"].write_bytes(b"x" * 5000)
    fresh = trainer(train, config, text)
    train.save(paths["saved"], fresh.settings, fresh.state())
    arguments = [x.format(**paths) for x in ("--text", str(text), *arguments)]
    assert train.main(arguments) == 2
    assert message in capsys.readouterr().err


def test_packages_that_are_missing(train, text, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "tqdm", None)
    assert train.main(["--text", str(text)]) == 2
    assert "pip install safetensors tqdm matplotlib" in capsys.readouterr().err


# Writing


PROMPTS = [b"one prompt, longer than a span of keys: " * 6, b"short", b"s"]


def logits_of(generate, config, prompts, steps=70, xp=np, dtype="float32", extra=0):
    """Of each step, those of each sequence, as bytes are drawn from them."""
    flat = xp.asarray(3 * config.initial(0))
    positions = [len(prompt) + steps + extra for prompt in prompts]
    model = generate.CachedGPT(config, flat, dtype, positions)
    sampler, uniform = generate.Sampler(xp), xp.full((len(prompts), 1), 0.4, np.float32)
    rows = [model.read(b, generate.as_tokens(xp, prompt)) for b, prompt in enumerate(prompts)]
    found = [xp.concatenate(rows)]
    for _ in range(steps):
        found.append(model.step(sampler(found[-1], uniform)))
    return xp.stack(found, axis=1).astype(np.float32)


def test_the_same_bits_in_any_batch(generate, config):
    together = logits_of(generate, config, PROMPTS)
    for b, prompt in enumerate(PROMPTS):
        alone = logits_of(generate, config, [prompt], extra=300)
        np.testing.assert_array_equal(alone[0], together[b])


def test_with_and_without_cache(gpt, generate, config):
    """The same text, from nearly the same logits."""
    flat = 3 * config.initial(0)
    sampler = generate.Sampler(np, temperature=0.9, top_p=0.9)
    texts, _ = generate.write(config, flat, PROMPTS, 70, seeds=[4, 5, 6], sampler=sampler)
    for prompt, text, seed in zip(PROMPTS, texts, (4, 5, 6)):
        plain = generate.write_without_cache(config, flat, prompt, 70, seed=seed, sampler=sampler)
        assert plain == text


def test_prompts_of_several_lengths(generate):
    """One fills pages and goes beyond a span of keys, one starts within a page."""
    lengths = [len(prompt) for prompt in PROMPTS]
    assert lengths[0] < generate.SPAN < lengths[0] + 70
    assert lengths[1] < generate.PAGE < lengths[1] + 70


def test_what_is_drawn(generate):
    """Of bytes with known chances: each as often as it should, none that top_p leaves out."""
    chances = np.array([0.5, 0.125, 0.3, 0.075])
    logits = np.full((200, 256), -np.inf, np.float32)
    logits[:, [7, 70, 3, 200]] = np.log(chances)
    uniform = ((np.arange(200) + 0.5) / 200).astype(np.float32)[:, None]
    for top_p, kept in ((1, 4), (0.8, 2), (0.81, 3), (0.1, 1)):
        token = generate.Sampler(np, top_p=top_p)(logits, uniform)
        found = np.bincount(token[:, 0], minlength=256)[[7, 3, 70, 200]] / 200
        wanted = np.sort(chances)[::-1] * (np.arange(4) < kept)
        np.testing.assert_allclose(found, wanted / wanted.sum(), atol=0.0051)
    cold = generate.Sampler(np, temperature=0.5)(logits, uniform)
    share = np.mean(cold == 7)
    np.testing.assert_allclose(share, 0.25 / np.sum(chances**2), atol=0.0051)
    assert (generate.Sampler(np, temperature=0)(logits, uniform) == 7).all()


def test_bytes_that_are_equally_likely(generate):
    uniform = np.linspace(0, 1, 512, endpoint=False, dtype=np.float32)[:, None]
    token = generate.Sampler(np)(np.zeros((512, 256), np.float32), uniform)
    np.testing.assert_array_equal(np.bincount(token[:, 0]), np.full(256, 2))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "--temperature", "-1"], "--temperature -1.0: give a number, 0 or above"),
        (["a", "--top-p", "0"], "--top-p 0.0: give a number above 0 and up to 1"),
        (["a", "--tokens", "0"], "--tokens 0: give a number above 0"),
        (["a", ""], "a prompt is empty: give a byte or more"),
    ],
)
def test_bad_wishes(arguments, message, train, generate, config, text, tmp_path, capsys):
    fresh = trainer(train, config, text)
    path = tmp_path / "saved"
    train.save(path, fresh.settings, fresh.state())
    assert generate.main([str(path), *arguments]) == 2
    assert message in capsys.readouterr().err


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_has_numpys_gradients(dtype, gpt, cupy):
    config = gpt.Config(**SIZES | {"context": 150})
    flat = config.initial(0)
    mine, theirs = gpt.GPT(config, flat), gpt.GPT(config, cupy.asarray(flat), dtype)
    batch = tokens_of(config)
    losses = mine.loss(*batch, backward=True), theirs.loss(*map(cupy.asarray, batch), backward=True)
    # Roundings of float32 sums; of bfloat16 those of every step of every layer.
    loss_error, error = (1e-6, 1e-5) if dtype == "float32" else (2e-3, 3e-2)
    np.testing.assert_allclose(float(losses[1]), losses[0], rtol=loss_error)
    for name, wanted in mine.g.items():
        found = theirs.g[name].astype(np.float32).get()
        assert np.linalg.norm(found - wanted) <= error * np.linalg.norm(wanted), name


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_learns_and_resumes(dtype, train, generate, text, tmp_path, capsys):
    path, again = str(tmp_path / "a"), str(tmp_path / "b")
    asked = ["--text", str(text), "--steps", "40", "--device", "gpu", "--dtype", dtype]
    assert train.main([*asked, "--save", path]) == 0
    assert train.main([*asked, "--until", "15", "--save", again]) == 0
    resumed = ["--text", str(text), "--device", "gpu", "--resume", again, "--save", again]
    assert train.main(resumed) == 0
    state, other = train.load(path)[1], train.load(again)[1]
    assert state["losses"][-1] < 0.5 * state["losses"][0]
    for name, wanted in state.items():
        np.testing.assert_array_equal(other[name], wanted, err_msg=name)
    capsys.readouterr()
    assert generate.main([path, "5 squared", "25", "--device", "gpu", "--dtype", dtype]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("squared; ") > 5
    assert re.search(r"[\d,]+ bytes/s of 2 sequences", printed.err)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_gives_the_same_bits_in_any_batch(dtype, generate, config, cupy):
    together = logits_of(generate, config, PROMPTS, xp=cupy, dtype=dtype)
    for b, prompt in enumerate(PROMPTS):
        alone = logits_of(generate, config, [prompt], xp=cupy, dtype=dtype, extra=300)
        cupy.testing.assert_array_equal(alone[0], together[b])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_graph_writes_what_single_launches_write(dtype, generate, config, cupy):
    flat = cupy.asarray(3 * config.initial(0))
    options, seeds = {"dtype": dtype, "sampler": generate.Sampler(cupy, 0.9, 0.9)}, [4, 5, 6]
    single, _ = generate.write(config, flat, PROMPTS, 70, seeds=seeds, graph=False, **options)
    for _ in range(2):
        captured, _ = generate.write(config, flat, PROMPTS, 70, seeds=seeds, **options)
        assert captured == single
    if dtype == "float32":
        for prompt, seed, text in zip(PROMPTS, seeds, single):
            plain = generate.write_without_cache(config, flat, prompt, 70, seed=seed, **options)
            assert plain == text


@pytest.mark.gpu
@pytest.mark.parametrize("prompts", [PROMPTS[:1], PROMPTS])
def test_a_gpu_takes_many_steps(prompts, gpt, generate, cupy):
    """Heads as wide as the large preset's, and no pause between steps."""
    sizes = SIZES | {"heads": 8, "key_heads": 2, "head_dim": 128}
    flat = cupy.asarray(3 * gpt.Config(**sizes).initial(0))
    options = {"seeds": range(len(prompts)), "dtype": "bfloat16"}
    texts = [
        generate.write(gpt.Config(**sizes), flat, prompts, 400, graph=graph, **options)[0]
        for graph in (False, True, False, True)
    ]
    assert all(text == texts[0] for text in texts)
