"""Programs saved by `torch.export.save`, named by `exported`: what is compiled, what is refused, and what is never run.

Most of the malicious archives here do run their code when `torch.export.load` gets them
(`test_torch_itself_would_run_them`), so the tests that find that nothing ran would notice if the checks were gone.
"""

from __future__ import annotations

import collections
import io
import json
import os
import pickle
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from conftest import run_python, unpack, write_files

from hatch_aoti.errors import ModelError, SavedProgramError, SettingsError
from hatch_aoti.export.program import load_program
from hatch_aoti.export.saved_expressions import check_guard, check_size
from hatch_aoti.export.signature import read_signature
from hatch_aoti.settings.model import ModelSettings
from hatch_aoti.settings.reader import parse_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from conftest import Builder, Projects

pytestmark = pytest.mark.filterwarnings("default")  # torch's own, at export

PROGRAM = "models/model.json"
INPUTS = "data/sample_inputs/model.pt"
WEIGHTS = "data/weights/model_weights_config.json"


class Scorer(torch.nn.Module):
    """A linear layer with a keyword, and a buffer that counts the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)
        self.calls: torch.Tensor
        self.register_buffer("calls", torch.zeros(64))

    def forward(
        self, x: torch.Tensor, mode: str = "sum", *, shift: torch.Tensor, unused: int = 3
    ) -> dict[str, torch.Tensor]:
        """Return a score for each row of `x`."""
        del unused
        self.calls.add_(1)
        values = self.linear(x) + shift
        return {"score": values.sum(1) if mode == "sum" else values, "calls": self.calls[0] + 0}


def export_scorer() -> torch.export.ExportedProgram:
    torch.manual_seed(7)
    batch = torch.export.Dim("batch", min=1, max=32)
    return torch.export.export(
        Scorer(),
        (torch.randn(8, 4), "sum"),
        {"shift": torch.randn(3)},
        dynamic_shapes={"x": {0: batch}, "mode": None, "shift": None},
    )


@pytest.fixture(scope="module")
def scorer() -> torch.export.ExportedProgram:
    return export_scorer()


@pytest.fixture(scope="module")
def saved(scorer: torch.export.ExportedProgram) -> dict[str, bytes]:
    """Return the members of a sound archive, by their names inside its folder."""
    buffer = io.BytesIO()
    torch.export.save(scorer, buffer)
    with zipfile.ZipFile(buffer) as archive:
        return {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}


def pack(path: Path, members: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    """Write an archive as torch lays it out."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(f"m/{name}", content)
    return path


def load(path: Path, device: str = "cpu") -> Any:
    """Load a program as a build does."""
    entry = ModelSettings("scorer", model="", inputs={}, exported=path.name)
    return load_program(entry, root=path.parent, device=device)


def refusal(path: Path, device: str = "cpu") -> str:
    """Return the text with which a program is refused."""
    with pytest.raises(ModelError) as caught:
        load(path, device)
    assert caught.value.stage == "load"
    assert caught.value.hint
    assert f'`exported = "{path.name}"`' in str(caught.value)
    return str(caught.value)


def edited(members: Mapping[str, bytes], member: str, change: Callable[[Any], None]) -> dict[str, bytes]:
    """Return the members with one JSON file changed in place."""
    value = json.loads(members[member])
    change(value)
    return {**members, member: json.dumps(value).encode()}


# --- What a program becomes ---


def test_a_program_keeps_its_names_ranges_state_and_answers(tmp_path: Path, saved: dict[str, bytes]) -> None:
    source = load(pack(tmp_path / "scorer.pt2", saved))
    signature = read_signature(
        source.program, forward=source.module.forward, args=source.args, kwargs=source.kwargs, output=source.output
    )
    assert str(signature).splitlines()[:2] == [
        "(x: float32[x_0, 4], mode: 'sum', *, shift: float32[3]) -> {'score': float32[x_0], 'calls': float32[]}",
        "  where x_0 = 1…32",
    ]
    assert signature.state == ("calls",)
    assert [parameter.kind for parameter in signature.parameters] == ["positional or keyword"] * 2 + ["keyword"]
    assert source.program.state_dict["calls"].sum() == 0, "the trial run left its count behind"
    want = export_scorer().module()(torch.ones(5, 4), "sum", shift=torch.zeros(3))
    got = source.module(torch.ones(5, 4), "sum", shift=torch.zeros(3))
    assert torch.equal(got["score"], want["score"])


def test_derived_dims_control_flow_and_struct_sequences_load(tmp_path: Path) -> None:
    class Flow(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
            z = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
            with torch.no_grad():
                found = torch.nonzero(z > 0)
            return torch.topk(z, 2, dim=1).values, torch.cat([x[:, :-1], y], 1), z.reshape(z.shape[0] // 2, -1), found

    half = torch.export.Dim("half", min=2, max=32)
    shapes = {"x": {0: 2 * half}, "y": {0: 2 * half}}
    example = (torch.randn(8, 4), torch.randn(8, 4))
    torch.export.save(torch.export.export(Flow(), example, dynamic_shapes=shapes), tmp_path / "flow.pt2")
    source = load(tmp_path / "flow.pt2")
    signature = read_signature(
        source.program, forward=source.module.forward, args=source.args, kwargs=source.kwargs, output=source.output
    )
    assert "x: float32[2*x_0, 4], y: float32[2*x_0, 4]" in str(signature)
    for got, want in zip(source.output, Flow()(*source.args), strict=True):
        assert torch.equal(got, want)


def test_a_wheel_with_a_saved_program_answers_like_eager_and_is_built_again_alike(
    tmp_path: Path, project: Projects, build: Builder, scorer: torch.export.ExportedProgram
) -> None:
    root = project("saved")
    torch.export.save(scorer, root / "programs" / "scorer.pt2")
    first = build.wheel(root)
    content = first.read_bytes()
    first.unlink()
    again = build(root)
    again.check()
    assert "from the cache" in again.output
    assert first.read_bytes() == content

    installed = unpack(first, tmp_path / "installed")
    answers = run_python(
        """
        import torch
        from tiny._models import scorer
        print(scorer.signature)
        for size in (1, 8, 32):
            answer = scorer(torch.arange(4.0 * size).reshape(size, 4) / 9, "sum", shift=torch.ones(3))
            print(answer["score"].tolist(), answer["calls"].item())
        try:
            scorer(torch.ones(33, 4), "sum", shift=torch.ones(3))
        except ValueError as error:
            print(error)
        """,
        installed,
    ).check()
    eager = scorer.module()
    lines = answers.output.splitlines()
    results = [line for line in lines if line.startswith("[")]
    for count, (size, line) in enumerate(zip((1, 8, 32), results, strict=True), start=1):
        want = eager(torch.arange(4.0 * size).reshape(size, 4) / 9, "sum", shift=torch.ones(3))["score"]
        score, _, calls = line.rpartition("] ")
        assert torch.allclose(torch.tensor(json.loads(score + "]")), want, rtol=1e-5)
        assert float(calls) == count
    assert "must be float32[x_0, 4], got float32[33, 4]" in lines[-1]

    # A build that remembers the program notices that its file is another one now.
    (root / "programs" / "scorer.pt2").write_text("another")
    changed = build(root)
    assert changed.returncode != 0
    assert '`exported = "programs/scorer.pt2"` is not a zip archive' in changed.output


# --- Settings ---


def settings_error(root: Path, table: str) -> list[str]:
    config = tomllib.loads(f"[tool.aoti.models.scorer]\n{table}")
    with pytest.raises(SettingsError) as caught:
        parse_settings(config, root=root, environ={})
    return [str(problem) for problem in caught.value.problems]


def test_what_the_program_says_cannot_be_said_again(tmp_path: Path, saved: dict[str, bytes]) -> None:
    pack(tmp_path / "scorer.pt2", saved)
    problems = settings_error(
        tmp_path,
        'exported = "scorer.pt2"\nmodel = "a:b"\nweights = "w.pt"\ninputs = "a:c"\ndims = {}\n'
        'dynamic-shapes = "a:d"\ndevice = "auto"\n',
    )
    keys = [problem.partition(":")[0].removeprefix("`tool.aoti.models.scorer.").rstrip("`") for problem in problems]
    assert keys == ["device", "dims", "dynamic-shapes", "inputs", "model", "weights"]
    assert all("not with `exported`: " in problem for problem in problems)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("programs/scorer.pt2", "there is no file"),
        ("../scorer.pt2", "below the project's root"),
        ("/scorer.pt2", "below the project's root"),
        ("scorer.onnx", "ends in .pt2"),
        ("folder.pt2", "is a folder"),
        ("", "an empty string"),
    ],
)
def test_a_program_is_a_file_in_the_project(tmp_path: Path, value: str, said: str) -> None:
    (tmp_path / "folder.pt2").mkdir()
    [problem] = settings_error(tmp_path, f'exported = "{value}"')
    assert problem.startswith("`tool.aoti.models.scorer.exported`: ")
    assert said in problem


def test_a_program_that_gitignore_keeps_out_of_the_sdist_is_named_before_anything_is_built(
    tmp_path: Path, project: Projects, build: Builder
) -> None:
    root = write_files(project("saved"), {"programs/scorer.pt2": "present in the tree", ".gitignore": "*.pt2\n"})
    build(root, "--sdist").check()
    with tarfile.open(root / "dist" / "tiny-1.0.tar.gz") as sdist:
        sdist.extractall(tmp_path / "unpacked", filter="data")
    missing = build(tmp_path / "unpacked" / "tiny-1.0")
    assert missing.returncode != 0
    assert "programs/scorer.pt2" in missing.output
    assert ".gitignore" in missing.output


def test_the_hook_for_all_targets_puts_an_ignored_program_into_the_sdist(project: Projects, build: Builder) -> None:
    root = project("saved", ("targets.wheel.hooks", "hooks"))
    write_files(root, {"programs/scorer.pt2": "not read for an sdist", ".gitignore": "*.pt2\n"})
    build(root, "--sdist").check()
    with tarfile.open(root / "dist" / "tiny-1.0.tar.gz") as sdist:
        assert "tiny-1.0/programs/scorer.pt2" in sdist.getnames()


# --- Files that are no programs ---


class Pair(NamedTuple):
    """A container that a saved program cannot restore without code."""

    left: torch.Tensor
    right: torch.Tensor


def script_file(path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)


BAD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "is an empty file"),
    "text": (lambda path: path.write_text("hello"), "is not a zip archive"),
    "Git LFS pointer": (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"), "git lfs pull"),
    "state dict": (lambda path: torch.save(torch.nn.Linear(2, 2).state_dict(), path), "holds a state dict"),
    "module": (lambda path: torch.save(Scorer(), path), "holds a pickled module"),
    "bare pickle": (lambda path: path.write_bytes(pickle.dumps({"x": 1})), "is a pickle"),
    "TorchScript": (script_file, "is a TorchScript file"),
    "other zip": (lambda path: zipfile.ZipFile(path, "w").writestr("a", "b"), "no exported program"),
    "zip without members": (lambda path: path.write_bytes(b"PK\5\6" + 18 * b"\0"), "no exported program"),
    "torch 2.7": (
        lambda path: zipfile.ZipFile(path, "w").writestr("serialized_exported_program.json", "{}"),
        "torch 2.7 or older",
    ),
    "folder": (Path.mkdir, "cannot be read"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_a_file_that_is_no_program_is_named_for_what_it_is(tmp_path: Path, kind: str) -> None:
    make, said = BAD_FILES[kind]
    make(tmp_path / "p.pt2")
    assert said in refusal(tmp_path / "p.pt2")


def without(members: Mapping[str, bytes], *names: str) -> dict[str, bytes]:
    return {name: content for name, content in members.items() if name not in names}


def set_device(program: Any) -> None:
    program["graph_module"]["graph"]["tensor_values"]["x"]["device"]["type"] = "cuda"


def set_schema(program: Any) -> None:
    program["schema_version"] = {"major": 99, "minor": 0}
    program["torch_version"] = "3.1.0"


BAD_PROGRAMS: dict[str, tuple[Callable[[dict[str, bytes]], Mapping[str, bytes]], str]] = {
    "compiled": (
        lambda m: {**without(m, PROGRAM), "data/aotinductor/model/x.so": b"ELF"},
        "AOTInductor compiled already",
    ),
    "program and compiled code": (
        lambda m: {**m, "data/aotinductor/model/x.so": b"ELF"},
        "AOTInductor compiled already",
    ),
    "two programs": (lambda m: {**m, "models/other.json": m[PROGRAM]}, "has 2 programs (`model`, `other`)"),
    "no program": (lambda m: without(m, PROGRAM), "has no program in it"),
    "no example inputs": (lambda m: {**m, INPUTS: b""}, "has no example inputs"),
    "weights in the old place": (lambda m: without(m, WEIGHTS), "torch 2.8 and newer write"),
    "newer schema": (lambda m: edited(m, PROGRAM, set_schema), "write `torch==3.1.0` in `build-system.requires`"),
    "newer operators": (
        lambda m: edited(m, PROGRAM, lambda p: p["opset_version"].update(aten=9999)),
        "by a newer torch",
    ),
    "older schema": (lambda m: edited(m, PROGRAM, lambda p: p["schema_version"].update(major=1)), "no longer reads"),
    "newer archive": (lambda m: {**m, "archive_version": b"7"}, "is not a PT2 archive of version 0"),
    "newer container": (lambda m: {**m, ".data/version": b"77\n"}, "of a newer torch"),
    "other byte order": (
        lambda m: {**m, "byteorder": b"big" if sys.byteorder == "little" else b"little"},
        "-endian machine",
    ),
    "for cuda": (lambda m: edited(m, PROGRAM, set_device), 'is a program for "cuda"'),
    "not JSON": (lambda m: {**m, PROGRAM: b"{"}, "is damaged"),
    "nested too deeply": (lambda m: {**m, PROGRAM: b"[" * 10**5 + b"]" * 10**5}, "nested more deeply"),
    "another JSON": (lambda m: {**m, PROGRAM: b"{}"}, "is damaged"),
    "weights cut off": (lambda m: {**m, "data/weights/weight_0": b"1234"}, "cannot be loaded by torch"),
}


@pytest.mark.parametrize("kind", BAD_PROGRAMS)
def test_a_program_that_cannot_be_compiled_here_says_why(tmp_path: Path, saved: dict[str, bytes], kind: str) -> None:
    change, said = BAD_PROGRAMS[kind]
    assert said in refusal(pack(tmp_path / "p.pt2", change(saved)))


def test_a_cpu_program_is_not_compiled_for_cuda(tmp_path: Path, saved: dict[str, bytes]) -> None:
    assert "move_to_device_pass(program, 'cuda')" in refusal(pack(tmp_path / "p.pt2", saved), "cuda")


@pytest.mark.parametrize("part", [0.3, 0.9])
def test_a_file_that_was_cut_off_is_refused(tmp_path: Path, saved: dict[str, bytes], part: float) -> None:
    path = pack(tmp_path / "p.pt2", saved)
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * part)])
    assert "is damaged or cut off" in refusal(path)


def test_a_flipped_bit_in_the_weights_is_noticed(tmp_path: Path, saved: dict[str, bytes]) -> None:
    path = pack(tmp_path / "p.pt2", saved)
    data = bytearray(path.read_bytes())
    data[data.index(saved["data/weights/weight_0"])] ^= 1
    path.write_bytes(bytes(data))
    assert "is damaged: Bad CRC-32" in refusal(path)


def test_a_program_without_example_inputs_as_torch_saves_it_is_refused(tmp_path: Path) -> None:
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.randn(3, 2),))
    program.example_inputs = None
    torch.export.save(program, tmp_path / "p.pt2")
    assert "has no example inputs" in refusal(tmp_path / "p.pt2")


def test_named_tuples_are_refused_with_the_way_around(tmp_path: Path) -> None:
    class Pairs(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> Pair:
            return Pair(x + 1, x + 2)

    torch.utils._pytree._register_namedtuple(Pair, serialized_type_name="tests.Pair")
    torch.export.save(torch.export.export(Pairs(), (torch.ones(2),)), tmp_path / "p.pt2")
    said = refusal(tmp_path / "p.pt2")
    assert "`collections.namedtuple`" in said
    assert "`model`, where named tuples and dataclasses work" in said


def test_custom_operators_are_refused_by_name(tmp_path: Path) -> None:
    @torch.library.custom_op("hatch_aoti_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @twice.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    class Twice(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            doubled: torch.Tensor = twice(x)
            return doubled

    torch.export.save(torch.export.export(Twice(), (torch.ones(2),)), tmp_path / "p.pt2")
    assert "calls `torch.ops.hatch_aoti_tests.twice.default`" in refusal(tmp_path / "p.pt2")


# --- Malicious archives ---


class RunsCode:
    """Unpickling it creates the file `$HATCH_TEST_MARKER`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch $HATCH_TEST_MARKER",)


COMMAND = "__import__('os').system('touch $HATCH_TEST_MARKER')"


def pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def graph(program: Any) -> Any:
    return program["graph_module"]["graph"]


def set_size(program: Any) -> None:
    graph(program)["tensor_values"]["x"]["sizes"][0] = {"as_expr": {"expr_str": COMMAND, "hint": {"as_int": 8}}}


def set_operator(program: Any) -> None:
    program["verifiers"] = []  # the program itself says who looks for operators like this
    node = graph(program)["nodes"][0]
    node["target"] = "torch.os.system"
    node["inputs"] = [{"name": "", "arg": {"as_string": "touch $HATCH_TEST_MARKER"}, "kind": 1}]


def set_defaultdict(program: Any) -> None:
    context = {"default_factory_module": "antigravity", "default_factory_name": "x", "dict_context": []}
    spec = {"type": "collections.defaultdict", "context": context, "children_spec": []}
    program["graph_module"]["module_call_graph"][0]["signature"]["out_spec"] = json.dumps([1, spec])


def set_enum(program: Any) -> None:
    context = json.dumps({"__enum__": True, "fqn": "antigravity:x", "name": "y"})
    spec = {"type": "builtins.dict", "context": context, "children_spec": []}
    program["graph_module"]["module_call_graph"][0]["signature"]["out_spec"] = json.dumps([1, spec])


def set_parameter(program: Any) -> None:
    names = program["graph_module"]["module_call_graph"][0]["signature"]["forward_arg_names"]
    names[1] = f"mode={COMMAND}"


def set_node_name(program: Any) -> None:
    graph(program)["inputs"][0] = {"as_tensor": {"name": f"x={COMMAND}"}}


def set_pickled_weight(config: Any) -> None:
    config["config"]["calls"].update(use_pickle=True, path_name="weight_9")


def set_opaque_weight(config: Any) -> None:
    config["config"]["calls"].update(use_pickle=True, path_name="opaque_obj_0")


ATTACKS: dict[str, tuple[Callable[[dict[str, bytes]], Mapping[str, bytes]], str]] = {
    "pickled inputs": (lambda m: {**m, INPUTS: pickled(((RunsCode(),), {}))}, "would run `posix.system`"),
    "pickled weight": (
        lambda m: {**edited(m, WEIGHTS, set_pickled_weight), "data/weights/weight_9": pickled(RunsCode())},
        "would run `posix.system`",
    ),
    "opaque object": (
        lambda m: {**edited(m, WEIGHTS, set_opaque_weight), "data/weights/opaque_obj_0": pickle.dumps(RunsCode())},
        "only unpickling can restore",
    ),
    "size": (lambda m: edited(m, PROGRAM, set_size), "where sizes are described"),
    "guard": (
        lambda m: edited(m, PROGRAM, lambda p: p.update(guards_code=[f"{COMMAND} == 0"])),
        "where sizes are described",
    ),
    "operator": (lambda m: edited(m, PROGRAM, set_operator), "calls `torch.os.system`"),
    "operator that opens files": (
        lambda m: edited(m, PROGRAM, lambda p: graph(p)["nodes"][0].update(target="torch.ops.aten.from_file.default")),
        "calls `torch.ops.aten.from_file.default`",
    ),
    "container that imports": (lambda m: edited(m, PROGRAM, set_defaultdict), "`collections.defaultdict`"),
    "enum that imports": (lambda m: edited(m, PROGRAM, set_enum), "keys other than strings and numbers"),
    "parameter": (lambda m: edited(m, PROGRAM, set_parameter), "no Python identifier"),
    "node": (lambda m: edited(m, PROGRAM, set_node_name), "would get into generated code"),
    "path traversal": (lambda m: {**m, "../../evil.py": b"1"}, "leaves the archive's folder"),
    "path traversal among the weights": (
        lambda m: edited(m, WEIGHTS, lambda c: c["config"]["calls"].update(path_name="weight_/../../../evil")),
        "only unpickling can restore",
    ),
}


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file that does not exist unless an archive's code ran."""
    path = tmp_path / "code-ran"
    monkeypatch.setenv("HATCH_TEST_MARKER", os.fspath(path))
    return path


@pytest.mark.parametrize("kind", ATTACKS)
def test_code_in_an_archive_is_refused_by_name_and_does_not_run(
    tmp_path: Path, saved: dict[str, bytes], marker: Path, kind: str
) -> None:
    change, said = ATTACKS[kind]
    before = set(sys.modules)
    assert said in refusal(pack(tmp_path / "p.pt2", change(saved)))
    assert not marker.exists()
    assert "antigravity" not in set(sys.modules) - before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.pt2"]


def test_torch_itself_would_run_them(tmp_path: Path, saved: dict[str, bytes]) -> None:
    kinds = ["pickled inputs", "pickled weight", "opaque object", "size", "guard", "enum that imports"]
    for kind in kinds:
        pack(tmp_path / f"{kind}.pt2", ATTACKS[kind][0](saved))
    loading = f"""
    import os, sys, torch
    sys.modules["webbrowser"] = sys  # what antigravity would open
    sys.open = print
    for kind in {kinds!r}:
        os.environ["HATCH_TEST_MARKER"] = kind.replace(" ", "-")
        try:
            torch.export.load(f"{{kind}}.pt2").module()(torch.ones(8, 4), "sum", shift=torch.ones(3))
        except Exception:
            pass
        print(kind, os.path.exists(os.environ["HATCH_TEST_MARKER"]) or "antigravity" in sys.modules)
    """
    told = run_python(loading, cwd=tmp_path).check().output.splitlines()
    assert [line for line in told if line.endswith(("True", "False"))] == [f"{kind} True" for kind in kinds]


def test_a_zip_bomb_is_refused_unread(tmp_path: Path, saved: dict[str, bytes]) -> None:
    bomb = {**saved, "data/weights/weight_0": bytes(1 << 26)}
    path = pack(tmp_path / "p.pt2", bomb, zipfile.ZIP_DEFLATED)
    assert path.stat().st_size < 1 << 20
    assert "is compressed, which torch never writes" in refusal(path)


def test_a_zip_bomb_inside_the_example_inputs_is_refused_unread(tmp_path: Path, saved: dict[str, bytes]) -> None:
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", pickle.dumps((), protocol=2))
        archive.writestr("a/data/0", bytes(1 << 26))
    path = pack(tmp_path / "p.pt2", {**saved, INPUTS: inner.getvalue()})
    assert "members that torch never writes" in refusal(path)


def test_members_that_appear_twice_are_refused(tmp_path: Path, saved: dict[str, bytes]) -> None:
    path = pack(tmp_path / "p.pt2", saved)
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"m/{PROGRAM}", "{}")
    assert "appears twice" in refusal(path)


def test_a_member_that_lies_about_its_size_is_refused(tmp_path: Path, saved: dict[str, bytes]) -> None:
    path = pack(tmp_path / "p.pt2", saved)
    data = bytearray(path.read_bytes())
    entry = data.rindex(b"PK\1\2")  # the last one of the central directory
    data[entry + 20 : entry + 28] = 2 * (1 << 30).to_bytes(4, "little")
    path.write_bytes(bytes(data))
    assert "larger than the file" in refusal(path)


def test_pickles_of_another_protocol_are_refused(tmp_path: Path, scorer: torch.export.ExportedProgram) -> None:
    torch.export.save(scorer, tmp_path / "p.pt2", pickle_protocol=4)
    assert "saved with the default pickle protocol" in refusal(tmp_path / "p.pt2")


def test_classes_of_the_inputs_are_not_imported(tmp_path: Path, saved: dict[str, bytes]) -> None:
    inputs = pickled((collections.deque([torch.ones(2)]), {}))
    said = refusal(pack(tmp_path / "p.pt2", {**saved, INPUTS: inputs}))
    assert "would run `collections.deque`" in said


def test_texts_of_assertions_do_not_get_into_generated_code(tmp_path: Path) -> None:
    class Checks(torch.nn.Module):
        def forward(self, x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
            size = count.item()
            torch._check(size >= 1, lambda: f'"{COMMAND}')
            torch._check(size <= 4)
            return x[:size]

    program = torch.export.export(Checks(), (torch.ones(4), torch.tensor(2)))
    torch.export.save(program, tmp_path / "p.pt2")
    source = load(tmp_path / "p.pt2")
    assert "assert" in source.module.code
    assert "'os'" not in source.module.code
    assert torch.equal(source.output, torch.ones(2))


@pytest.mark.parametrize(
    "text",
    [
        "10**10**10",
        "Pow(Integer(10), Pow(Integer(10), Integer(10)))",
        "Pow(Pow(Pow(Integer(2), Integer(64)), Integer(64)), Integer(64))",
        "PowByNatural(Symbol('s0'), Integer(99999999))",
        "LShift(Integer(1), Integer(1000000000))",
        "Integer(1) << 99999999",
        "Float('1e999999', precision=53)",
        "Float('0.5', precision=99999999999999999999999)",
        "Integer(99999999999999999999999999)",
    ],
)
def test_expressions_that_take_for_ever_to_evaluate_are_refused(text: str) -> None:
    with pytest.raises(SavedProgramError, match="where sizes are described"):
        check_size(text)
    with pytest.raises(SavedProgramError, match="where sizes are described"):
        check_guard("L['x'].size()[0] < 10**10**10")


def test_expressions_that_torch_writes_are_taken() -> None:
    for text in (
        "Add(Mul(Integer(2), Symbol('s77', positive=True, integer=True)), Integer(-1))",
        "Pow(Symbol('s0', positive=True, integer=True), Integer(2))",
        "Pow(Symbol('s0'), Rational(1, 2))",
        "Float('1.0e-30', precision=53)",
        "Integer(9223372036854775807)",
    ):
        check_size(text)
    check_guard("L['x'].size()[0] ** 2 <= 16")
