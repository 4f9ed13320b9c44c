"""The options of torch._inductor.config, read from its source."""

from __future__ import annotations

import subprocess
import sys

import pytest

from hatch_aoti.settings.inductor import (
    DECIDED_OPTIONS,
    Option,
    check_inductor_configs,
    flatten_inductor_configs,
    installed_options,
)

KEY = "tool.aoti.models.digits.inductor-configs"


def message(name, value):
    (problem,) = check_inductor_configs({name: value}, KEY)
    assert problem.key == f"{KEY}.{name}"
    return problem.message


@pytest.fixture(scope="module")
def config():
    import torch._inductor.config

    return torch._inductor.config


def test_the_source_has_exactly_the_options_that_torch_has(config):
    # torch counts the import of `typing.TYPE_CHECKING`, a boolean, among its options.
    assert set(installed_options()) == set(config._config) - {"TYPE_CHECKING"}


def test_every_default_of_torch_passes_the_check(config):
    defaults = {name: config._config[name].default for name in installed_options()}
    toml_values = {
        name: list(value) if isinstance(value, (tuple, set)) else value
        for name, value in defaults.items()
        if isinstance(value, (bool, int, float, str, list, tuple, set, dict)) and name not in DECIDED_OPTIONS
    }
    assert len(toml_values) > 300
    assert check_inductor_configs(toml_values, KEY) == []


def test_what_hatch_aoti_decides_are_options_of_torch():
    assert set(DECIDED_OPTIONS) <= set(installed_options())


def test_most_options_have_a_type():
    options = installed_options()
    assert sum(bool(option.types) for option in options.values()) > 0.8 * len(options)
    assert options["max_autotune"] == Option(frozenset([bool]))  # os.environ.get(…) == "1"
    assert options["cpp.min_chunk_size"] == Option(frozenset([int]))  # int(os.environ.get(…))
    assert options["cpp.descriptive_names"].choices == ("torch", "original_aten", "inductor_node")
    assert options["cuda.enable_cuda_lto"] == Option(frozenset([bool]))
    assert "cuda.upload_to_binary_remote_cache" in options  # inherited from `cutlass`


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_autotune", True),
        ("cpp.min_chunk_size", 64),
        ("cpp.gemm_cache_blocking", "4,1,10"),
        ("cpp.descriptive_names", "torch"),
        ("post_grad_fusion_options", {"batch_linear": {}}),
        ("rocm.arch", ["gfx942"]),
    ],
)
def test_a_value_of_the_right_type_is_accepted(name, value):
    assert check_inductor_configs({name: value}, KEY) == []


@pytest.mark.parametrize(
    ("name", "value", "telling"),
    [
        ("max_autotun", True, 'no such option. Did you mean "max_autotune"?'),
        ("max-autotune", True, 'Did you mean "max_autotune"?'),
        ("min-chunk-size", 64, 'Did you mean "cpp.min_chunk_size"?'),
        ("cpp.min_chunk_sise", 64, 'Did you mean "cpp.min_chunk_size"?'),
        ("xyzzy", 1, "torch._inductor.config has no such option."),
        ("max_autotune", 1, "expects true or false, but it is 1."),
        ("max_autotune", "true", 'expects true or false, but it is "true".'),
        ("cpp.min_chunk_size", True, "expects an integer, but it is true."),
        ("cpp.min_chunk_size", "64", "expects an integer"),
        ("rocm.arch", "gfx942", "expects a list"),
        ("cpp.descriptive_names", "aten", 'one of "torch", "original_aten", "inductor_node"'),
        ("cpp.simdlen", 256, "choose one with `tool.aoti.target`. Remove it."),
        ("cpp.march", "native", "choose one with `tool.aoti.target`"),
        ("cpp.cxx", "clang++", "choose one with the variable CXX"),
        ("cpp.threads", 4, "left to run time"),
        ("cpp.dynamic_threads", False, "left to run time"),
        ("aot_inductor.package", True, "hatch-aoti writes the .pt2 file itself"),
        ("aot_inductor.output_path", "x", "hatch-aoti writes the .pt2 file itself"),
        ("aot_inductor.package_constants_in_so", False, "where the weights are stored"),
    ],
)
def test_a_wrong_option_says_what_to_write_instead(name, value, telling):
    assert telling in message(name, value)


def test_nested_tables_become_dotted_names_unless_the_option_is_a_table():
    configs = {
        "cpp": {"min_chunk_size": 64, "x": {"y": 1}},
        "aot_inductor.enable_lto": True,
        "post_grad_fusion_options": {"batch_linear": {}},
    }
    assert flatten_inductor_configs(configs) == [
        ("aot_inductor.enable_lto", True),
        ("cpp.min_chunk_size", 64),
        ("cpp.x.y", 1),
        ("post_grad_fusion_options", {"batch_linear": {}}),
    ]


def test_without_torch_the_problem_says_where_to_require_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = check_inductor_configs({"max_autotune": True}, KEY)
    assert problem.key == KEY
    assert "`build-system.requires`" in problem.message
    assert check_inductor_configs({}, KEY) == []


def test_a_torch_that_keeps_its_options_elsewhere_is_left_to_the_compiler(monkeypatch, tmp_path):
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    assert check_inductor_configs({"new_option": 1}, KEY) == []
    assert "Remove it" in message("cpp.march", "native")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x: bool | None = f()", {"x": Option(frozenset([bool]))}),
        ("x: int | float = 1", {"x": Option(frozenset([int, float]))}),
        ("x: 'Callable | None' = None", {"x": Option()}),
        ("x = None", {"x": Option()}),
        ("x = -1", {"x": Option(frozenset([int]))}),
        ("x = not f()", {"x": Option(frozenset([bool]))}),
        ("x: int", {}),  # no value, no option
        ("def f():\n    x = 1\nimport y", {}),
        ("if f():\n    x = 1\nelse:\n    x = 'a'", {"x": Option(frozenset([int, str]))}),
        ("if f():\n    x = 1\nelse:\n    x = g()", {"x": Option()}),
        (
            "class a:\n    x = 1\nclass b(a):\n    y: str = ''",
            {"a.x": Option(frozenset([int])), "b.x": Option(frozenset([int])), "b.y": Option(frozenset([str]))},
        ),
    ],
)
def test_options_are_read_from_any_form_of_assignment(source, expected, monkeypatch, tmp_path):
    (tmp_path / "_inductor").mkdir()
    (tmp_path / "_inductor" / "config.py").write_text(source, encoding="utf-8")
    spec = type("Spec", (), {"submodule_search_locations": [str(tmp_path)]})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: spec)
    assert installed_options() == expected


def test_reading_the_options_does_not_import_torch():
    code = (
        "import sys, hatch_aoti.settings.inductor as o; print(len(o.installed_options()) > 0, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n"
