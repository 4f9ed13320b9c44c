"""Baselines: which are known, which this builder may produce, and what they mean for torch."""

import platform

import pytest

from hatch_aoti.compiler.target import (
    TORCH_PICKS,
    builder_cpu_features,
    missing_features,
    parse_cpuinfo,
    resolve_targets,
)
from hatch_aoti.errors import AotiError

V2 = frozenset({"sse3", "ssse3", "sse4_1", "sse4_2", "popcnt"})
V3 = V2 | {"avx", "avx2", "bmi", "bmi2", "f16c", "fma3", "lzcnt"}
V4 = V3 | {"avx512_f", "avx512_bw", "avx512_cd", "avx512_dq", "avx512_vl"}
BUILDER = V4 | {"avx512_vnni", "avx512_bf16", "amx_tile"}


def resolve(*names, system="Linux", machine="x86_64", features=BUILDER):
    return resolve_targets(names, system=system, machine=machine, builder_features=features)


@pytest.mark.parametrize(
    ("system", "machine", "features", "name"),
    [
        ("Linux", "x86_64", BUILDER, "x86-64-v3"),
        ("linux", "AMD64", BUILDER, "x86-64-v3"),
        ("Linux", "aarch64", {"neon"}, "armv8-a"),
        ("Darwin", "arm64", (), "apple-m1"),
    ],
)
def test_no_name_means_the_portable_default(system, machine, features, name):
    assert [target.name for target in resolve(system=system, machine=machine, features=features)] == [name]


def test_default_does_not_depend_on_what_else_the_builder_can():  # pytorch/pytorch#121516
    assert resolve(features=V3) == resolve(features=BUILDER)


def test_several_targets_come_best_first_and_once():
    names = [target.name for target in resolve("x86-64-v3", "x86-64-v4", "x86-64-v3", "x86-64-v2")]
    assert names == ["x86-64-v4", "x86-64-v3", "x86-64-v2"]


@pytest.mark.parametrize(
    ("name", "features", "march", "simdlen", "vec_isa"),
    [
        ("x86-64-v2", V2, "x86-64-v2", 1, None),
        ("x86-64-v3", V3, "x86-64-v3", 256, "VecAVX2"),
        ("x86-64-v4", V4, "x86-64-v4", 512, "VecAVX512"),
    ],
)
def test_x86_levels_are_those_of_the_psabi(name, features, march, simdlen, vec_isa):
    (target,) = resolve(name)
    assert set(target.features) == features
    assert target.vec_isa == vec_isa
    assert target.inductor_options() == {"cpp.march": march, "cpp.simdlen": simdlen, "cpp.dynamic_threads": True}


def test_vector_isas_of_the_targets_exist_in_torch_and_stay_within_their_level():
    cpu_vec_isa = pytest.importorskip("torch._inductor.cpu_vec_isa")
    within = {
        "x86-64-v3": {"-mavx2", "-mfma", "-mf16c"},
        "x86-64-v4": {"-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma"},
        "armv8-a": set(),
    }
    for name, flags in within.items():
        machine = "aarch64" if name.startswith("arm") else "x86_64"
        (target,) = resolve(name, machine=machine, features=BUILDER | {"neon"})
        isa = getattr(cpu_vec_isa, target.vec_isa)()
        assert isa.bit_width() == target.simdlen
        assert set(isa.build_arch_flags().split()) <= flags
    assert resolve("x86-64-v2")[0].simdlen not in {isa.bit_width() for isa in cpu_vec_isa.supported_vec_isa_list}


def test_native_records_the_builders_features_and_leaves_the_choice_to_torch():
    (target,) = resolve("native", features=BUILDER)
    assert set(target.features) == BUILDER
    assert target.vec_isa == TORCH_PICKS
    assert target.inductor_options() == {"cpp.march": None, "cpp.simdlen": None, "cpp.dynamic_threads": True}
    assert missing_features(target, V4) == ("amx_tile", "avx512_bf16", "avx512_vnni")


def test_native_on_apple_silicon_is_the_baseline_because_clang_knows_no_march_native():
    (target,) = resolve("native", system="Darwin", machine="arm64", features=())
    assert (target.name, target.march, target.vec_isa) == ("native", "", "VecNEON")


@pytest.mark.parametrize(
    ("names", "where", "says"),
    [
        (
            ["x86-64-v5"],
            {},
            ["unknown target `x86-64-v5`", 'Did you mean "x86-64-v', "x86-64-v2, x86-64-v3, x86-64-v4, nat"],
        ),
        (["x86_64-v3"], {}, ['Did you mean "x86-64-v3"?']),
        (["armv8-a"], {}, ["`armv8-a` is for linux on aarch64", "cross compiling is not supported"]),
        (["apple-m1"], {"machine": "aarch64", "features": {"neon"}}, ["`apple-m1` is for darwin on arm64"]),
        (["native", "x86-64-v3"], {}, ["`native` cannot be combined with `x86-64-v3`"]),
        (["x86-64-v4"], {"features": V3}, ["this CPU lacks avx512_f, avx512_bw", "choose `x86-64-v3`"]),
        ([], {"features": V2}, ["`x86-64-v3` (AVX2) cannot be checked here", "lacks avx, avx2", "choose `x86-64-v2`"]),
        (["x86-64-v2"], {"features": ()}, ["Build on a machine that has them."]),
        ([], {"system": "Windows", "machine": "AMD64"}, ["does not support Windows yet"]),
        ([], {"system": "Darwin", "machine": "x86_64"}, ["no targets for darwin on x86_64"]),
        ([], {"machine": "ppc64le"}, ["no targets for linux on ppc64le"]),
        (["x86-64-v4", "mips"], {"features": V3}, ["lacks avx512_f", "unknown target `mips`"]),
    ],
)
def test_a_target_that_cannot_be_built_or_checked_is_refused_with_the_reason(names, where, says):
    with pytest.raises(AotiError) as error:
        resolve(*names, **where)
    for words in says:
        assert words in str(error.value)


def test_missing_features_keep_the_order_of_the_level():
    (target,) = resolve("x86-64-v4")
    assert missing_features(target, V3) == ("avx512_f", "avx512_bw", "avx512_cd", "avx512_dq", "avx512_vl")
    assert missing_features(target, V4) == ()


def test_cpuinfo_is_read_in_torchs_names_and_counts_only_what_every_core_has():
    text = (
        "processor\t: 0\nflags\t\t: fpu pni fma abm bmi1 bmi2 avx512f avx_vnni movbe\n\n"
        "processor\t: 1\nflags\t\t: fpu pni fma abm bmi1 bmi2 movbe\nbugs\t\t: spectre_v1\n"
    )
    assert parse_cpuinfo(text) == {"sse3", "fma3", "lzcnt", "bmi", "bmi2"}
    arm = "processor\t: 0\nFeatures\t: fp asimd aes crc32 atomics fphp asimdhp asimdrdm asimddp\n"
    assert parse_cpuinfo(arm) == {"neon", "aes", "crc32", "atomics", "fp16_arith", "rdm", "dot"}
    assert parse_cpuinfo("processor: 0\n") == frozenset()


@pytest.mark.skipif(platform.system() != "Linux", reason="reads /proc/cpuinfo")
def test_what_native_asks_for_is_what_torch_reports_on_the_builder():
    torch = pytest.importorskip("torch")
    reported = {name for name, value in torch.cpu.get_capabilities().items() if value is True}
    features = builder_cpu_features()
    assert features
    assert features <= reported
