"""What one seed draws of a random problem: kernels, sizes, options and where arrays lie."""

from __future__ import annotations

import numpy as np
from cases import numpy_dtype, random_mask

from cuflash import BlockMask, ScoreMod

MAX_DIM = {"mma": {"float32": 128, "float64": 128}, "wgmma": {"float32": 128}, "simt": {}}
LAYOUTS = {"wgmma": ("bnhd", "padded"), "mma": ("bnhd", "odd"), "simt": ("reversed", "columns")}


class Draw:
    """What one seed draws."""

    def __init__(self, *seed: int):
        self.rng = np.random.default_rng(seed[0] if len(seed) == 1 else seed)

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def pick(self, *choices):
        return choices[self.rng.integers(len(choices))]

    def integer(self, low: int, high: int) -> int:
        """One from low to high."""
        return int(self.rng.integers(low, high + 1))

    def normal(self, *shape, dtype="float32"):
        return self.rng.standard_normal(shape).astype(numpy_dtype(dtype))

    def kernel(self, backward):
        engine = self.pick("wgmma", "wgmma", "mma", "mma", "simt")
        dtypes = ["float16", "bfloat16", "bfloat16", "float32", "float64"]
        if engine == "wgmma":
            dtypes.remove("float64")
        if engine == "mma" and backward:
            dtypes.remove("float32")
        dtype = self.pick(*dtypes)
        algos = ["fa1", "fa2", "fa2"]
        if engine == "wgmma":
            algos = ["fa2", "fa3", "fa3"] if backward or dtype == "float32" else [*algos, "fa3"]
        return self.pick(*algos), engine, dtype

    def dims(self, engine, dtype):
        most = MAX_DIM[engine].get(dtype, 256 if engine != "simt" else 512)
        step = 8 if engine == "wgmma" else 1

        def draw():
            return self.pick(64, 128, 32, step * self.integer(1, most // step))

        dim = draw()
        return dim, dim if self.chance(0.7) else draw()

    def length(self):
        return self.pick(self.integer(1, 5), self.integer(1, 300), self.integer(100, 500), 128, 256)

    def band(self, batch, n, m):
        options = {"causal": self.pick(False, False, True, True, "top_left")}
        if self.chance(0.25):
            left, right = self.integer(0, m), self.integer(0, 90)
            options["window"] = self.pick(left, (left, None), (None, right), (left, right))
        if self.chance(0.2) and options["causal"] != "top_left":
            places = self.rng.integers(-n, m + 5, batch)
            options["q_offset"] = self.pick(int(places[0]), places.astype(np.int32))
        if self.chance(0.2):
            options["q_lengths"] = self.rng.integers(0, n + 3, batch).astype(np.int32)
        if self.chance(0.25):
            options["kv_lengths"] = self.rng.integers(0, m + 3, batch)
        return options

    def mask(self, batch, heads, n, m):
        seed, axes = self.integer(0, 1 << 30), self.pick((batch, heads), (heads,), (), (batch, 1))
        kind = self.rng.random()
        if kind < 0.12:
            shown = random_mask((*axes, n, m), 32, seed=seed, shown=0.6)
            return {"mask": BlockMask.from_dense(shown, self.pick(16, 32, 64, 128))}
        if kind < 0.25:
            return {"mask": random_mask((*axes, n, m), 16, seed=seed, shown=0.6)}
        if kind < 0.3:
            return {"mask": self.rng.random((batch, 1, 1, m)) < 0.7}
        if kind < 0.37:
            ids, reach = self.rng.integers(0, 3, n + m), self.integer(0, 100)
            function = self.pick(
                lambda b, h, q, k: (ids[q] == ids[k]) & (k <= q + reach),
                lambda b, h, q, k: (q - k < reach << h) | (k % 3 == b),
            )
            shape = (*axes, n, m)
            return {"mask": BlockMask.from_function(function, shape, self.pick(32, 128))}
        return {}

    def scores(self, dtype, batch, heads, n, m):
        options = {}
        if self.chance(0.12):
            options["softcap"] = self.pick(1.5, 20.0)
        if self.chance(0.15):
            slopes = abs(self.normal(batch, heads)) / 5
            options["alibi_slopes"] = self.pick(slopes, slopes[0])
        if self.chance(0.15):
            options["sinks"] = self.normal(heads)
        if self.chance(0.2):
            axes = self.pick((batch, heads), (heads,), (), (batch, 1))
            rows = self.pick((n, m), (n, m), (1, m), (n, 1))
            options["bias"] = self.normal(*axes, *rows, dtype=self.pick(dtype, dtype, "float32"))
        if self.chance(0.08):
            options["score_mod"] = ScoreMod(
                "where((q + k) % 3 == 0, score / 2, score) + t[head] * (k - q) / 50",
                t=self.normal(heads),
            )
        if self.chance(0.1):
            options["scale"] = self.rng.random()
        if self.chance(0.2):
            options |= {"dropout_p": self.pick(0.1, 0.5), "seed": self.integer(0, 1 << 40)}
        return options

    def layouts(self, engine, backward):
        if self.chance(0.75):
            return {}
        layout = self.pick(*LAYOUTS[engine])
        names = [*self.pick("qkv", "q", "k", "v")]
        if self.chance(0.5):
            names.append("dout" if backward else "out")
        if backward and self.chance(0.3):
            names += ["dq", "dk", "dv"]
        return dict.fromkeys(names, layout)
