"""Turns the inline PTX of a preprocessed CUDA source into calls of the emulator's runtime.

Each PTX instruction becomes one C++ statement. Operands are taken by their position in the PTX
text, so a swapped ``%4`` and ``%5`` goes wrong on the CPU as it does on the device, and C++
overloads check that each operand's type fits its constraint letter. An instruction without a model
raises NotImplementedError; nothing is skipped.
"""

import re
from pathlib import Path

VERSION = Path(__file__).read_bytes()

_ASM = re.compile(r"\b(?:asm|__asm__|__asm)\s*((?:volatile|__volatile__)\s*)?\(")
_SHARED = re.compile(
    r"extern\s+((?:__shared__|(?:__align__|alignas)\s*\(\s*\d+\s*\)|\s+)+)"
    r"([\w\s:]+?)\s*\b(\w+)\s*\[\s*\]\s*;"
)


# ------------------------------------------------------------------------------ reading C++
def _closing(text, start):
    """Position after the bracket that closes the one before ``start``; strings are skipped."""
    depth, i = 1, start
    while depth:
        if i >= len(text):
            raise SyntaxError("unbalanced brackets")
        if text[i] in "\"'":
            quote = text[i]
            i += 1
            while text[i] != quote:
                i += 2 if text[i] == "\\" else 1
        else:
            depth += (text[i] in "([{") - (text[i] in ")]}")
        i += 1
    return i


def _split(text, separator):
    """Split at a separator outside brackets and strings."""
    parts, begin, i = [], 0, 0
    while i < len(text):
        if text[i] in "([{":
            i = _closing(text, i + 1)
        elif text[i] == '"':
            i += 1
            while text[i] != '"':
                i += 2 if text[i] == "\\" else 1
            i += 1
        else:
            if text[i] == separator:
                parts.append(text[begin:i])
                begin = i + 1
            i += 1
    return [*parts, text[begin:]]


def _literal(text):
    """The value of adjacent string literals."""
    pieces = re.findall(r'R"\((.*?)\)"|"((?:[^"\\]|\\.)*)"', text, re.S)
    return "".join(raw or bytes(plain, "utf8").decode("unicode_escape") for raw, plain in pieces)


def _place(text, position):
    """``file:line`` of a position, from the preprocessor's line markers."""
    file, line, start = "source", 1, 0
    for marker in re.finditer(r'^# (\d+) "([^"]*)".*\n', text[:position], re.M):
        file, line, start = marker[2], int(marker[1]), marker.end()
    return f"{file}:{line + text.count(chr(10), start, position)}"


def kernels(text):
    """(name, most threads) of each kernel, from a preprocessed source."""
    found = []
    for start in re.finditer(r"\b__global__\b", text):
        before = re.split(r"[;}]", text[: start.start()])[-1]
        if re.search(r"\btemplate\b", before):
            raise NotImplementedError(f"{_place(text, start.start())}: templated kernel")
        i, bound = start.end(), "1024"
        if bounds := re.search(r"__launch_bounds__\s*\(", before):
            bound = _first_argument(before, bounds.end())
        while True:
            word = re.compile(r"\s*(\w+)\s*(\(?)").match(text, i)
            if word[1] == "__launch_bounds__":
                bound = _first_argument(text, word.end())
            elif word[2] and not word[1].startswith("__"):
                found.append((word[1], bound))
                break
            i = _closing(text, word.end()) if word[2] else word.end()
    return found


def _first_argument(text, start):
    return _split(text[start : _closing(text, start) - 1], ",")[0].strip()


def translate(text):
    """Replace dynamic shared memory and asm statements in a preprocessed source."""
    text = _SHARED.sub(lambda match: _shared_pointer(text, match), text)
    if left := re.search(r"\b__shared__\b", text):
        place = _place(text, left.start())
        raise NotImplementedError(f"{place}: only one dynamic shared array is modelled")
    pieces, done = [], 0
    for number, match in enumerate(_ASM.finditer(text)):
        end = _closing(text, match.end())
        body = text[match.end() : end - 1]
        semicolon = text.index(";", end)
        try:
            code = _Statement(body, bool(match[1]), number).code()
        except NotImplementedError as error:
            raise NotImplementedError(f"{_place(text, match.start())}: {error}") from None
        lines = text.count("\n", match.start(), semicolon)
        pieces += [text[done : match.start()], f"{{ {code} }}", "\n" * lines]
        done = semicolon + 1
    return "".join([*pieces, text[done:]])


def _shared_pointer(text, match):
    if "__shared__" not in match[1]:
        return match[0]
    opened = []  # where braces that are still open begin
    for brace in re.finditer(r"[{}]", text[: match.start()]):
        if brace[0] == "{":
            opened.append(brace.start())
        else:
            opened.pop()
    outside = re.compile(r'(?:extern\s*"C"|namespace[\s\w:]*)\s*$')
    if all(outside.search(text[max(0, at - 200) : at]) for at in opened):
        place = _place(text, match.start())
        raise NotImplementedError(f"{place}: shared memory declared outside a function")
    return f"{match[2]}* {match[3]} = ({match[2]}*)emu_shared_memory();"


# ------------------------------------------------------------------------------ one asm statement
_REGISTER_TYPES = {
    "pred": "int",
    "b16": "emu_u16",
    "u16": "emu_u16",
    "b32": "emu_u32",
    "u32": "emu_u32",
    "s32": "int",
    "b64": "emu_u64",
    "u64": "emu_u64",
    "s64": "long long",
    "f32": "float",
    "f64": "double",
}
_LETTER_TYPES = {"r": "emu_u32", "l": "emu_u64", "h": "emu_u16", "f": "float", "d": "double"}
_SPECIAL = {"laneid": "emu_lane()"}


class _Statement:
    """One asm statement: its operands and its instructions."""

    def __init__(self, body, volatile, number):
        sections = [*_split(body, ":"), "", "", ""]
        self.text, self.number = _literal(sections[0]), number
        self.volatile, self.clobbers = volatile, _literal(sections[3])
        self.letters, self.locals, self.arrays, self.setup = [], {}, {}, []
        for output, section in ((True, sections[1]), (False, sections[2])):
            for part in _split(section, ","):
                if part.strip():
                    self._declare(part.strip(), output)

    def fail(self, message):
        raise NotImplementedError(f"{message}: {' '.join(self.text.split())}")

    def _declare(self, part, output):
        match = re.fullmatch(r'"([^"]*)"\s*\((.*)\)', part, re.S)
        if not match:
            self.fail(f"asm operand {part!r}")
        letter, name = match[1].lstrip("=+&"), f"emu_operand{len(self.letters)}"
        if output != (match[1][0] in "=+") or letter not in [*_LETTER_TYPES, "n"]:
            self.fail(f"asm constraint {match[1]!r}")
        self.letters.append(letter)
        if output:
            self.setup.append(f"auto& {name} = emu_out_{letter}({match[2]});")
        elif letter == "n":
            self.setup.append(f"constexpr long long {name} = (long long)({match[2]});")
        else:
            self.setup.append(f"const auto {name} = emu_in_{letter}({match[2]});")

    def code(self):
        """C++ statements that do what the PTX does."""
        body = []
        text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", self.text, flags=re.S)
        while text := text.lstrip():
            if text[0] in "{};":
                text = text[1:]
            elif label := re.match(r"([\w$%]+)\s*:(?!:)", text):
                body.append(f"{self._label(label[1])}:;")
                text = text[label.end() :]
            else:
                statement, _, text = text.partition(";")
                body.append(self._instruction(" ".join(statement.split())))
        declared = [f"{kind} {name};" for name, kind in self.locals.values()]
        return " ".join([*self.setup, *declared, *body])

    def _label(self, name):
        return f"emu_label_{self.number}_{re.sub(r'[^A-Za-z0-9_]', '_', name)}"

    def _instruction(self, text):
        if declared := re.fullmatch(r"\.reg \.(\w+) ([\w%, ]+)", text):
            for name in declared[2].replace(" ", "").split(","):
                kind = _REGISTER_TYPES.get(declared[1]) or self.fail("register type")
                self.locals[name] = f"emu_register_{len(self.locals)}", kind
            return ""
        guard = re.match(r"@(!?)([\w%]+) ", text)
        if guard:
            text = text[guard.end() :]
        opcode, _, operands = text.partition(" ")
        for pattern, handler in _HANDLERS:
            if match := re.fullmatch(pattern, opcode):
                self._check_clobbers(opcode)
                parts = [part.strip() for part in _split(operands, ",")] if operands else []
                try:
                    code = handler(self, match, parts)
                except (IndexError, ValueError):
                    self.fail("operands of PTX not understood")
                if guard:
                    code = f"if ({guard[1]}{self.value(guard[2])}) {{ {code} }}"
                return f"{{ {code} }}" if not code.startswith("goto") else code
        return self.fail("no CPU model for PTX")

    def _check_clobbers(self, opcode):
        """What the CPU cannot see: an asm that the device compiler may move or drop."""
        if re.match(r"ldmatrix|ld\.shared|ld\.global(?!\.nc)", opcode):
            if not self.volatile and "memory" not in self.clobbers:
                self.fail('asm that reads memory must be volatile or clobber "memory"')
        elif re.match(r"wgmma\.mma_async|setmaxnreg", opcode):
            if not self.volatile:
                self.fail("asm must be volatile")
        elif re.match(
            r"cp\.|mbarrier|fence|membar|bar\.|barrier|red\.|atom\.|st\.|stmatrix|wgmma"
            r"|ld\.(acquire|relaxed|volatile)",
            opcode,
        ) and not (self.volatile and "memory" in self.clobbers):
            self.fail('asm with a side effect must be volatile and clobber "memory"')

    # -------------------------------------------------------------------------- operands
    def value(self, operand, letters=None):
        """C++ expression of a register or immediate; ``letters``: constraints that fit."""
        if match := re.fullmatch(r"%(\d+)", operand):
            letter = self.letters[int(match[1])]
            if letters and letter not in letters + "n":
                self.fail(f'operand {operand} is "{letter}", the instruction takes "{letters}"')
            return f"emu_operand{match[1]}"
        if operand in self.locals:
            return self.locals[operand][0]
        if match := re.fullmatch(r"%%(\w+)", operand):
            return _SPECIAL.get(match[1]) or self.fail(f"special register {operand}")
        if re.fullmatch(r"-?\d+", operand) or re.fullmatch(r"0[xX][0-9a-fA-F]+U?", operand):
            return operand
        if match := re.fullmatch(r"0[fF]([0-9a-fA-F]{8})", operand):
            return f"__uint_as_float(0x{match[1]}u)"
        return self.fail(f"operand {operand!r}")

    def values(self, operand, letters=None):
        """Expressions of a ``{a, b}`` list, or of a single register."""
        inner = operand[1:-1] if operand.startswith("{") else operand
        return [self.value(part.strip(), letters) for part in inner.split(",")]

    def pointers(self, registers):
        """An array of pointers to float registers, one for all instructions that name the same."""
        addresses = ", ".join("&" + register for register in registers)
        if addresses not in self.arrays:
            self.arrays[addresses] = f"emu_pointers{len(self.arrays)}"
            self.setup.append(f"float* {self.arrays[addresses]}[] = {{{addresses}}};")
        return self.arrays[addresses]

    def immediate(self, operand):
        match = re.fullmatch(r"%(\d+)", operand)
        if match and self.letters[int(match[1])] != "n":
            self.fail(f'operand {operand} must be an immediate ("n")')
        return self.value(operand)

    def address(self, operand, space):
        """Expression of ``[a]`` or ``[a + 16]``: a shared address, or a global pointer."""
        match = re.fullmatch(r"\[\s*([\w%]+)\s*(?:\+\s*([\w%]+))?\s*\]", operand)
        if not match:
            self.fail(f"address {operand!r}")
        offset = f" + {self.immediate(match[2])}" if match[2] else ""
        if space == "shared":
            return f"(emu_u32)({self.value(match[1], 'rl')}{offset})"
        return f"(void*)({self.value(match[1], 'l')}{offset})"


# ------------------------------------------------------------------------------ instructions
_HANDLERS = []
_CTA = r"(?:::cta)?"


def _ptx(pattern):
    """Register the model of the opcodes that match a regular expression."""

    def register(function):
        _HANDLERS.append((pattern, function))
        return function

    return register


def _assign(targets, source):
    return " ".join(f"{target} = {source}[{i}];" for i, target in enumerate(targets))


def _expect(condition):
    if not condition:
        raise ValueError


@_ptx(rf"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared{_CTA}\.b16")
def _(asm, m, ops):
    targets = asm.values(ops[0], "r")
    _expect(len(targets) == int(m[1]) and len(ops) == 2)
    call = (
        f"emu_load_matrix({asm.address(ops[1], 'shared')}, r, {m[1]}, {int(bool(m[2]))}, EMU_HERE);"
    )
    return f"emu_u32 r[4]; {call} {_assign(targets, 'r')}"


@_ptx(rf"stmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared{_CTA}\.b16")
def _(asm, m, ops):
    sources = asm.values(ops[1], "r")
    _expect(len(sources) == int(m[1]) and len(ops) == 2)
    address, trans = asm.address(ops[0], "shared"), int(bool(m[2]))
    listed = ", ".join(sources)
    return f"emu_u32 r[] = {{{listed}}}; emu_store_matrix({address}, r, {m[1]}, {trans}, EMU_HERE);"


# Shape and input type -> kind (index into MMA_SHAPES of warp.cpp), numbers of A, B, C registers.
_MMA = {
    ("m16n8k16", "f16"): (0, 4, 2, 4),
    ("m16n8k16", "bf16"): (1, 4, 2, 4),
    ("m16n8k8", "f16"): (2, 2, 1, 4),
    ("m16n8k8", "bf16"): (3, 2, 1, 4),
    ("m16n8k8", "tf32"): (4, 4, 2, 4),
    ("m16n8k4", "tf32"): (5, 2, 1, 4),
    ("m8n8k4", "f64"): (6, 1, 1, 2),
    ("m16n8k4", "f64"): (7, 2, 1, 4),
    ("m16n8k8", "f64"): (8, 4, 2, 4),
    ("m16n8k16", "f64"): (9, 8, 4, 4),
}


@_ptx(r"mma\.sync\.aligned\.(m\d+n\d+k\d+)\.row\.col\.(f32|f64)\.(\w+)\.(\w+)\.(f32|f64)")
def _(asm, m, ops):
    kind, a_count, b_count, c_count = _MMA.get((m[1], m[3])) or asm.fail("no CPU model for PTX")
    double = m[3] == "f64"
    _expect(m[3] == m[4] and m[2] == m[5] == ("f64" if double else "f32"))
    inputs, sums = ("d", "d") if double else ("r", "f")
    d, a, b, c = (
        asm.values(operand, letters)
        for operand, letters in zip(ops, (sums, inputs, inputs, sums), strict=True)
    )
    _expect((len(a), len(b), len(c), len(d)) == (a_count, b_count, c_count, c_count))
    sum_type, input_type = _LETTER_TYPES[sums], _LETTER_TYPES[inputs]
    return (
        f"{input_type} a[] = {{{', '.join(a)}}}, b[] = {{{', '.join(b)}}};"
        f" {sum_type} c[] = {{{', '.join(c)}}}, d[4]; emu_mma({kind}, d, a, b, c, EMU_HERE);"
        f" {_assign(d, 'd')}"
    )


@_ptx(rf"cp\.async\.(ca|cg)\.shared{_CTA}\.global(?:\.L2::\d+B)?")
def _(asm, m, ops):
    size = asm.immediate(ops[2])
    source_size = asm.value(ops[3], "r") if len(ops) == 4 else size
    _expect(len(ops) in (3, 4))
    sizes = "16" if m[1] == "cg" else f"4 || {size} == 8 || {size} == 16"
    return (
        f'static_assert({size} == {sizes}, "cp.async.{m[1]} size"); '
        f"emu_cp_async({asm.address(ops[0], 'shared')}, {asm.address(ops[1], 'global')},"
        f" {size}, (int){source_size}, EMU_HERE);"
    )


@_ptx(r"cp\.async\.commit_group")
def _(asm, m, ops):
    return "emu_cp_async_commit();"


@_ptx(r"cp\.async\.wait_(group|all)")
def _(asm, m, ops):
    return f"emu_cp_async_wait({asm.immediate(ops[0]) if m[1] == 'group' else -1}, EMU_HERE);"


@_ptx(rf"cp\.async\.mbarrier\.arrive(\.noinc)?\.shared{_CTA}\.b64")
def _(asm, m, ops):
    return f"emu_cp_async_arrive({asm.address(ops[0], 'shared')}, {int(not m[1])}, EMU_HERE);"


# -- arithmetic
_FUNCTIONS = {
    "ex2": "emu_exp2_approx",
    "lg2": "emu_log2_approx",
    "tanh": "emu_tanh_approx",
    "rcp": "1.0f / ",
    "rsqrt": "rsqrtf",
    "sqrt": "__builtin_sqrtf",
}


@_ptx(r"(ex2|lg2|tanh|rcp|rsqrt|sqrt)\.approx(?:\.ftz)?\.f32")
def _(asm, m, ops):
    target, x = (asm.value(op, "f") for op in ops)
    return f"{target} = {_FUNCTIONS[m[1]]}({x});"


@_ptx(r"(add|sub|mul|min|max|fma)(?:\.rn)?(?:\.ftz)?\.f(32|64)")
def _(asm, m, ops):
    target, *x = (asm.value(op, "f" if m[2] == "32" else "d") for op in ops)
    signs = {"add": "__{0}add_rn", "sub": "__{0}sub_rn", "mul": "__{0}mul_rn"}
    name = signs.get(m[1], {"fma": "fma", "min": "fmin", "max": "fmax"}.get(m[1], ""))
    return f"{target} = {name.format('f' if m[2] == '32' else 'd')}({', '.join(x)});"


@_ptx(r"(min|max)\.NaN(?:\.ftz)?\.f32")
def _(asm, m, ops):
    target, a, b = (asm.value(op, "f") for op in ops)
    return f"{target} = emu_{m[1]}_or_nan({a}, {b});"


@_ptx(r"(min|max)\.NaN\.xorsign\.abs(?:\.ftz)?\.f32")
def _(asm, m, ops):
    target, a, b = (asm.value(op, "f") for op in ops)
    return f"{target} = emu_{m[1]}_of_magnitudes({a}, {b});"


@_ptx(r"add\.[su](32|64)")
def _(asm, m, ops):
    target, a, b = map(asm.value, ops)
    return f"{target} = {a} + {b};"


@_ptx(r"prmt\.b32")
def _(asm, m, ops):
    target, *x = (asm.value(op, "r") for op in ops)
    return f"{target} = emu_permute({', '.join(x)});"


@_ptx(r"mul\.wide\.u32")
def _(asm, m, ops):
    target, a, b = map(asm.value, ops)
    return f"{target} = (emu_u64){a} * {b};"


@_ptx(r"cvt\.rn(?:\.satfinite)?\.(bf16x2|f16x2)\.f32")
def _(asm, m, ops):
    target, high, low = asm.value(ops[0], "r"), asm.value(ops[1], "f"), asm.value(ops[2], "f")
    name = "bfloat16" if m[1] == "bf16x2" else "half"
    return f"{target} = emu_pack_{name}({high}, {low});"


@_ptx(r"cvt\.rna\.tf32\.f32")
def _(asm, m, ops):
    return f"{asm.value(ops[0], 'r')} = emu_round_to_tf32({asm.value(ops[1], 'f')});"


@_ptx(r"cvt\.(u32\.u64|u64\.u32|s64\.s32)")
def _(asm, m, ops):
    return f"{asm.value(ops[0])} = {asm.value(ops[1])};"


@_ptx(r"cvta\.to\.shared\.u64")
def _(asm, m, ops):
    return f"{asm.value(ops[0])} = emu_shared_address((const void*){asm.value(ops[1], 'l')});"


@_ptx(r"mov\.([bus]32|[bus]64|f32|f64)|cvta\.to\.global\.u64")
def _(asm, m, ops):
    return f"{asm.value(ops[0])} = {asm.value(ops[1])};"


@_ptx(r"setp\.(eq|ne|lt|le|gt|ge)\.([bus]32|[bus]64|f32)")
def _(asm, m, ops):
    sign = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}[m[1]]
    kind = _REGISTER_TYPES[m[2]]
    target, a, b = map(asm.value, ops)
    return f"{target} = ({kind}){a} {sign} ({kind}){b};"


@_ptx(r"abs\.f16x2")
def _(asm, m, ops):
    target, x = (asm.value(op, "r") for op in ops)
    return f"{target} = {x} & 0x7fff7fffu;"


@_ptx(r"set\.geu\.xor\.u32\.f16x2")
def _(asm, m, ops):
    target, *x = (asm.value(op, "r") for op in ops)
    found = f"const int found = emu_halves_geu_xor({', '.join(x)});"
    return f"{found} {target} = (found & 1 ? 0xffffu : 0) | (found & 2 ? 0xffff0000u : 0);"


@_ptx(r"setp\.geu\.xor\.f16x2")
def _(asm, m, ops):
    first, second = (asm.value(op) for op in ops[0].split("|"))
    x = (asm.value(op, "r") for op in ops[1:])
    found = f"const int found = emu_halves_geu_xor({', '.join(x)});"
    return f"{found} {first} = found & 1; {second} = found >> 1;"


@_ptx(r"selp\.([bus]32|[bus]64|f32)")
def _(asm, m, ops):
    target, a, b, condition = map(asm.value, ops)
    return f"{target} = {condition} ? {a} : {b};"


@_ptx(r"bra(?:\.uni)?")
def _(asm, m, ops):
    return f"goto {asm._label(ops[0])};"


@_ptx(r"elect\.sync")
def _(asm, m, ops):
    target, _, condition = ops[0].partition("|")
    _expect(target == "_")
    return f"{asm.value(condition)} = emu_elect({asm.value(ops[1])}, EMU_HERE);"


# -- barriers and fences
@_ptx(r"(?:bar|barrier)(?:\.cta)?\.(sync|arrive)(?:\.aligned)?")
def _(asm, m, ops):
    count = asm.value(ops[1]) if len(ops) == 2 else "0"
    _expect(m[1] == "sync" or len(ops) == 2)
    return f"emu_barrier({asm.value(ops[0])}, {count}, {int(m[1] == 'sync')}, EMU_HERE);"


@_ptx(r"(?:bar|barrier)(?:\.cta)?\.red\.popc(?:\.aligned)?\.u32")
def _(asm, m, ops):
    target, barrier, count, vote = map(asm.value, ops)
    return f"{target} = emu_barrier_vote({barrier}, {count}, {vote}, EMU_HERE);"


@_ptx(
    r"fence\.proxy\.async(?:\.shared::cta|\.global|\.shared::\{cta\}\.global)?"
    r"|fence\.mbarrier_init\.release\.cluster"
)
def _(asm, m, ops):
    return "emu_fence_async();"


@_ptx(r"membar\.(gl|cta|sys)|fence(?:\.sc|\.acq_rel)\.(gpu|cta|sys|cluster)")
def _(asm, m, ops):
    return f"emu_thread_fence({int('cta' not in m[0])});"


@_ptx(r"setmaxnreg\.(inc|dec)\.sync\.aligned\.u32|prefetch\.tensormap")
def _(asm, m, ops):
    return ";"


@_ptx(r"nanosleep\.u32")
def _(asm, m, ops):
    return "emu_yield(EMU_HERE);"


# -- mbarriers
_SCOPED = r"(?:\.(?:release|acquire|relaxed)\.(?:cta|cluster))?"


@_ptx(rf"mbarrier\.(init|inval)\.shared{_CTA}\.b64")
def _(asm, m, ops):
    if m[1] == "inval":
        return f"emu_mbarrier_invalidate({asm.address(ops[0], 'shared')}, EMU_HERE);"
    return f"emu_mbarrier_init({asm.address(ops[0], 'shared')}, {asm.value(ops[1])}, EMU_HERE);"


@_ptx(rf"mbarrier\.expect_tx(?:\.relaxed\.(?:cta|cluster))?\.shared{_CTA}\.b64")
def _(asm, m, ops):
    return f"emu_mbarrier_expect({asm.address(ops[0], 'shared')}, {asm.value(ops[1])}, EMU_HERE);"


@_ptx(rf"mbarrier\.arrive(\.expect_tx)?{_SCOPED}\.shared{_CTA}\.b64")
def _(asm, m, ops):
    state = "" if ops[0] == "_" else f"{asm.value(ops[0], 'l')} = "
    address, extra = asm.address(ops[1], "shared"), asm.value(ops[2]) if len(ops) == 3 else None
    _expect(extra or not m[1])
    count, size = ("1", extra) if m[1] else (extra or "1", "0")
    return f"{state}emu_mbarrier_arrive({address}, {count}, {size}, EMU_HERE);"


@_ptx(rf"mbarrier\.(try|test)_wait(\.parity)?{_SCOPED}\.shared{_CTA}\.b64")
def _(asm, m, ops):
    # A state's lowest bit is the parity of its phase. A suspend-time hint is ignored.
    done, address, parity = asm.value(ops[0]), asm.address(ops[1], "shared"), asm.value(ops[2])
    block = int(m[1] == "try")
    return f"{done} = emu_mbarrier_wait({address}, (emu_u32)({parity}), {block}, EMU_HERE);"


# -- bulk copies
_HINT = r"(\.L2::cache_hint)?"


def _coordinates(asm, operand, rank):
    """The map and coordinates of ``[map, {x, y}]``."""
    tensor_map, _, coordinates = operand[1:-1].partition(",")
    listed = asm.values(coordinates.strip(), "r")
    _expect(len(listed) == rank)
    pointer = f"(const void*){asm.value(tensor_map.strip(), 'l')}"
    return f"int c[] = {{{', '.join(f'(int){x}' for x in listed)}}};", pointer


@_ptx(
    r"cp\.async\.bulk\.tensor\.([1-5])d\.shared::(?:cluster|cta)\.global(?:\.tile)?"
    rf"\.mbarrier::complete_tx::bytes{_HINT}"
)
def _(asm, m, ops):
    setup, pointer = _coordinates(asm, ops[1], int(m[1]))
    target, barrier = asm.address(ops[0], "shared"), asm.address(ops[2], "shared")
    _expect(len(ops) == 3 + bool(m[2]))
    return f"{setup} emu_tensor_load({target}, {pointer}, {barrier}, {m[1]}, c, EMU_HERE);"


@_ptx(
    r"cp\.(reduce\.)?async\.bulk\.tensor\.([1-5])d\.global\.shared::cta(\.add)?(?:\.tile)?"
    rf"\.bulk_group{_HINT}"
)
def _(asm, m, ops):
    _expect(bool(m[1]) == bool(m[3]) and len(ops) == 2 + bool(m[4]))
    setup, pointer = _coordinates(asm, ops[0], int(m[2]))
    source = asm.address(ops[1], "shared")
    return f"{setup} emu_tensor_store({pointer}, {source}, {m[2]}, c, {int(bool(m[1]))}, EMU_HERE);"


@_ptx(rf"cp\.async\.bulk\.shared::(?:cluster|cta)\.global\.mbarrier::complete_tx::bytes{_HINT}")
def _(asm, m, ops):
    _expect(len(ops) == 4 + bool(m[1]))
    target, barrier = asm.address(ops[0], "shared"), asm.address(ops[3], "shared")
    source, size = asm.address(ops[1], "global"), asm.value(ops[2])
    return f"emu_bulk_load({target}, {source}, {size}, {barrier}, EMU_HERE);"


@_ptx(rf"cp\.(reduce\.)?async\.bulk\.global\.shared::cta\.bulk_group{_HINT}(\.add\.f32)?")
def _(asm, m, ops):
    _expect(bool(m[1]) == bool(m[3]) and len(ops) == 3 + bool(m[2]))
    target, source = asm.address(ops[0], "global"), asm.address(ops[1], "shared")
    return f"emu_bulk_store({target}, {source}, {asm.value(ops[2])}, {int(bool(m[1]))}, EMU_HERE);"


@_ptx(r"cp\.async\.bulk\.prefetch\.L2\.global")
def _(asm, m, ops):
    return f"emu_bulk_prefetch({asm.address(ops[0], 'global')}, {asm.value(ops[1])}, EMU_HERE);"


@_ptx(r"cp\.async\.bulk\.prefetch\.tensor\.([1-5])d\.L2\.global(?:\.tile)?")
def _(asm, m, ops):
    _expect(len(ops) == 1)
    setup, pointer = _coordinates(asm, ops[0], int(m[1]))
    return f"{setup} emu_tensor_prefetch({pointer}, {m[1]}, c, EMU_HERE);"


@_ptx(r"cp\.async\.bulk\.commit_group")
def _(asm, m, ops):
    return "emu_bulk_commit();"


@_ptx(r"cp\.async\.bulk\.wait_group(\.read)?")
def _(asm, m, ops):
    return f"emu_bulk_wait({asm.immediate(ops[0])}, {int(bool(m[1]))}, EMU_HERE);"


# -- wgmma
@_ptx(r"wgmma\.(fence|commit_group)\.sync\.aligned")
def _(asm, m, ops):
    return f"emu_wgmma_{'fence' if m[1] == 'fence' else 'commit'}(EMU_HERE);"


@_ptx(r"wgmma\.wait_group\.sync\.aligned")
def _(asm, m, ops):
    return f"emu_wgmma_wait({asm.immediate(ops[0])}, EMU_HERE);"


@_ptx(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(bf16|f16)\.(bf16|f16)")
def _(asm, m, ops):
    n, d = int(m[1]), asm.values(ops[0], "f")
    _expect(m[2] == m[3] and n % 8 == 0 and 8 <= n <= 256 and len(d) == n // 2)
    in_registers = ops[1].startswith("{")
    # A from registers has no transpose immediate.
    accumulate, a_sign, b_sign, *transposed = ops[3:]
    _expect(len(transposed) == (1 if in_registers else 2))
    if (asm.value(a_sign), asm.value(b_sign)) != ("1", "1"):
        asm.fail("wgmma is modelled with scale immediates of 1 only")
    a_transposed, b_transposed = ["0", *map(asm.immediate, transposed)][-2:]
    setup, a, a_descriptor = "", "0", "0"
    if in_registers:
        registers = asm.values(ops[1], "r")
        _expect(len(registers) == 4)
        setup, a = f"emu_u32 a[] = {{{', '.join(registers)}}};", "a"
    else:
        a_descriptor = asm.value(ops[1], "l")
    return (
        f"{setup} emu_wgmma({asm.pointers(d)}, {a}, {a_descriptor}, {asm.value(ops[2], 'l')}, {n},"
        f" {int(m[2] == 'f16')}, {asm.value(accumulate)}, {a_transposed}, {b_transposed},"
        " EMU_HERE);"
    )


# -- loads, stores, reductions
_TYPE = r"(b16|u16|b32|u32|s32|f32|b64|u64|s64|f64)"
_LETTER_OF = {"16": "h", "32": "r", "64": "l"}
_SCOPE = r"(?:\.(?:cta|cluster|gpu|sys))?"


def _letter(kind):
    return {"f32": "f", "f64": "d"}.get(kind) or _LETTER_OF[kind[1:]]


def _memory_type(kind):
    # Loads and stores move bits: the type of the register.
    return _LETTER_TYPES[_letter(kind)]


@_ptx(
    rf"ld\.(shared{_CTA}|global)(?:\.nc)?(?:\.(?:ca|cg|cs|lu))?(?:\.L1::\w+)?(?:\.L2::\w+)?"
    rf"(\.v[24])?\.{_TYPE}"
)
def _(asm, m, ops):
    targets = asm.values(ops[0], _letter(m[3]))
    return _plain(asm, m, ops[1], targets, " {0} = v.x[{1}];", "v = *p;")


@_ptx(rf"st\.(shared{_CTA}|global)(?:\.(?:wb|cg|cs|wt))?(\.v[24])?\.{_TYPE}")
def _(asm, m, ops):
    sources = asm.values(ops[1], _letter(m[3]))
    return _plain(asm, m, ops[0], sources, " v.x[{1}] = {0};", "*p = v;", last=True)


def _plain(asm, m, address, registers, move, access, last=False):
    count = int(m[2][2]) if m[2] else 1
    _expect(len(registers) == count)
    kind = _memory_type(m[3])
    space = "shared" if m[1].startswith("shared") else "global"
    pointer = asm.address(address, space)
    if space == "shared":
        pointer = f"emu_shared_pointer({pointer})"
    vector = (
        f"struct __attribute__((aligned({count} * sizeof({kind})))) V {{ {kind} x[{count}]; }};"
    )
    moves = "".join(move.format(register, i) for i, register in enumerate(registers))
    steps = f"{moves} {access}" if last else f"{access}{moves}"
    return f"{vector} V v, *p = (V*){pointer}; {steps}"


@_ptx(rf"ld\.(acquire|relaxed|volatile){_SCOPE}\.global\.{_TYPE}")
def _(asm, m, ops):
    target, pointer = asm.value(ops[0], _letter(m[2])), asm.address(ops[1], "global")
    acquire = int(m[1] == "acquire")
    return f"emu_load_strong({pointer}, &{target}, sizeof {target}, {acquire}, EMU_HERE);"


@_ptx(rf"st\.(release|relaxed|volatile){_SCOPE}\.global(\.v[24])?\.{_TYPE}")
def _(asm, m, ops):
    pointer, values = asm.address(ops[0], "global"), asm.values(ops[1], _letter(m[3]))
    release, kind, count = int(m[1] == "release"), _memory_type(m[3]), int(m[2][2]) if m[2] else 1
    _expect(len(values) == count)
    aligned = f"emu_vector_aligned({pointer}, {count} * sizeof *v, EMU_HERE);" if count > 1 else ""
    stores = " ".join(
        f"emu_store_strong((char*){pointer} + {i} * sizeof *v, v + {i}, sizeof *v, {release},"
        " EMU_HERE);"
        for i in range(count)
    )
    return f"{kind} v[] = {{{', '.join(values)}}}; {aligned} {stores}"


@_ptx(r"griddepcontrol\.(wait|launch_dependents)")
def _(asm, m, ops):  # kernels run one after the other, but the checker is told who has waited
    return "emu_await_kernels();" if m[1] == "wait" else ""


_ORDERS = {"acquire": 1, "release": 2, "acq_rel": 3}
_ATOMIC_TYPES = {"f32": 0, "s32": 1, "u32": 2, "b32": 2, "f64": 3, "u64": 4, "b64": 4, "s64": 5}
_OPERATIONS = {"add": 0, "max": 1, "min": 2, "exch": 3, "cas": 4, "or": 5, "and": 6, "xor": 7}


@_ptx(
    rf"(red|atom)(?:\.(relaxed|acquire|release|acq_rel))?{_SCOPE}\.global(?:\.(v[24]))?"
    rf"\.(add|max|min|exch|cas|or|and|xor)(?:\.(v[24]))?\.{_TYPE}"
)
def _(asm, m, ops):
    kind, letter, order = m[6], _letter(m[6]), _ORDERS.get(m[2], 0)
    target = None if m[1] == "red" else asm.values(ops.pop(0), letter)
    count = int((m[3] or m[5] or "v1")[1])
    pointer, values = asm.address(ops[0], "global"), asm.values(ops[1], letter)
    compare = "0"
    setup = f"{_memory_type(kind)} v[] = {{{', '.join(values)}}}, old[{count}];"
    if m[4] == "cas":
        # PTX order: compare, then the value to store.
        setup += f" {_memory_type(kind)} compare = v[0]; v[0] = {asm.value(ops[2], letter)};"
        compare = "&compare"
    _expect(len(values) == count and (count == 1 or kind == "f32"))
    aligned = f"emu_vector_aligned({pointer}, {4 * count}, EMU_HERE);" if count > 1 else ""
    operation = f"{_OPERATIONS[m[4]]}, {_ATOMIC_TYPES[kind]}"
    calls = " ".join(
        f"emu_atomic((char*){pointer} + {i} * sizeof *v, {operation},"
        f" v + {i}, old + {i}, {compare}, {order}, EMU_HERE);"
        for i in range(count)
    )
    return f"{setup} {aligned} {calls} {_assign(target or [], 'old')}"
