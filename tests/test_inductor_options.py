"""The options of torch._inductor.config: those that hatch-aoti decides, and what the worker says to all others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from test_build import edit

from hatch_aoti.compiler.options import check_options, whole_tables
from hatch_aoti.errors import CompileError
from hatch_aoti.settings.inductor import DECIDED_OPTIONS, check_inductor_configs, flatten_inductor_configs, split_name

if TYPE_CHECKING:
    from conftest import Builder

KEY = "tool.aoti.models.digits.inductor-configs"


@pytest.fixture(scope="module")
def config():
    import torch._inductor.config

    return torch._inductor.config


def refused(name, value):
    with pytest.raises(CompileError) as caught:
        check_options({"max_autotune": False, name: value})
    assert f"`{name}`" in caught.value.reason
    return caught.value.reason


# --- In the build process ---


def test_what_hatch_aoti_decides_are_options_of_torch(config):
    assert set(DECIDED_OPTIONS) <= set(config._config)


@pytest.mark.parametrize(
    ("configs", "name", "telling"),
    [
        ({"cpp.simdlen": 256}, "cpp.simdlen", "choose one with `tool.aoti.target`. Remove it."),
        ({"cpp": {"march": "native"}}, "cpp.march", "choose one with `tool.aoti.target`"),
        ({"cpp.cxx": "clang++"}, "cpp.cxx", "choose one with the variable CXX"),
        ({"cpp": {"cxx": ["a", "b"]}}, "cpp.cxx", "choose one with the variable CXX"),
        ({"cpp.threads": 4}, "cpp.threads", "left to run time"),
        ({"cpp.dynamic_threads": False}, "cpp.dynamic_threads", "left to run time"),
        ({"aot_inductor.package": True}, "aot_inductor.package", "hatch-aoti writes the .pt2 file itself"),
        ({"aot_inductor.output_path": "x"}, "aot_inductor.output_path", "hatch-aoti writes the .pt2 file itself"),
        ({"aot_inductor.package_constants_in_so": False}, "aot_inductor.package_constants_in_so", "weights are stored"),
        ({"aot_inductor": {"metadata": {"a": "b"}}}, "aot_inductor.metadata.a", "what the loader needs"),
    ],
)
def test_an_option_that_hatch_aoti_decides_says_what_to_write_instead(configs, name, telling):
    (problem,) = check_inductor_configs(dict(flatten_inductor_configs(configs)), KEY)
    assert problem.key == f"{KEY}.{name}"
    assert telling in problem.message


def test_nested_tables_become_dotted_names():
    configs = {
        "cpp": {"min_chunk_size": 64, "x": {"y": 1}},
        "aot_inductor.enable_lto": True,
        "unsafe_marked_cacheable_functions": {"a.b": "c", 'x"\\': {"d": 1}},
        "post_grad_fusion_options": {"batch_linear": {}},
    }
    flat = flatten_inductor_configs(configs)
    assert flat == [
        ("aot_inductor.enable_lto", True),
        ("cpp.min_chunk_size", 64),
        ("cpp.x.y", 1),
        ("post_grad_fusion_options.batch_linear", {}),
        ('unsafe_marked_cacheable_functions."a.b"', "c"),
        ('unsafe_marked_cacheable_functions."x\\"\\\\".d', 1),
    ]
    assert split_name(flat[4][0]) == ["unsafe_marked_cacheable_functions", "a.b"]
    assert split_name(flat[5][0]) == ["unsafe_marked_cacheable_functions", 'x"\\', "d"]
    assert check_inductor_configs(dict(flat), KEY) == []


# --- In the worker ---


def test_every_default_of_torch_is_an_option_that_may_be_set(config):
    defaults = {name: entry.default for name, entry in config._config.items()}
    of_toml = {name: value for name, value in defaults.items() if isinstance(value, (bool, int, float, str))}
    assert len(of_toml) > 300
    check_options(of_toml)
    assert whole_tables(defaults) == defaults


@pytest.mark.parametrize(
    "configs",
    [
        {"post_grad_fusion_options": {"batch_linear": {}, "batch_tanh": {"min_fuse_set_size": 2}}},
        {"unsafe_marked_cacheable_functions": {"torch.ops.mine": "key"}, "max_autotune": True},
        {"pre_grad_fusion_options": {}, "cpp.min_chunk_size": 64},
    ],
)
def test_what_is_a_table_in_torch_is_one_again(configs):
    assert whole_tables(dict(flatten_inductor_configs(configs))) == configs
    check_options(whole_tables(dict(flatten_inductor_configs(configs))))


def test_a_group_in_which_nothing_is_set_is_no_option():
    assert whole_tables({"cpp": {}, "max_autotune": True}) == {"max_autotune": True}
    assert whole_tables({"cpq": {}}) == {"cpq": {}}


@pytest.mark.parametrize(
    ("name", "value", "telling"),
    [
        ("max_autotun", True, 'has no inductor option `max_autotun`. Did you mean "max_autotune"?'),
        ("max-autotune", True, 'Did you mean "max_autotune"?'),
        ("min-chunk-size", 64, 'Did you mean "cpp.min_chunk_size"?'),
        ("cpp.min_chunk_sise", 64, 'Did you mean "cpp.min_chunk_size"?'),
        ("xyzzy", 1, "has no inductor option `xyzzy`."),
        ("max_autotune", 1, "takes true or false for the inductor option `max_autotune`, but it is 1"),
        ("max_autotune", "false", "but it is 'false'"),
        ("cpp.min_chunk_size", True, "takes an integer"),
        ("cpp.min_chunk_size", "64", "takes an integer"),
    ],
)
def test_a_wrong_option_is_refused_by_name(name, value, telling):
    assert telling in refused(name, value)


def test_a_build_with_an_unknown_option_fails_with_the_one_that_was_meant(tiny, build: Builder):
    edit(
        tiny,
        "[tool.aoti.models.scale]",
        "[tool.aoti.models.scale]\ninductor-configs = { cpp = { min_chunk_sise = 64 } }",
    )
    ran = build(tiny)
    assert ran.returncode == 1
    text = ran.output.replace("\n", " ")
    assert "model `scale` failed at stage `compile`: torch 2." in text
    assert 'has no inductor option `cpp.min_chunk_sise`. Did you mean "cpp.min_chunk_size"?' in text
