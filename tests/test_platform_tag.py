"""The platform tag is the lowest that every compiled object allows, and never below torch's own."""

import subprocess
from importlib import metadata

import pytest
from packaging import tags

from hatch_aoti.artifact.shared_object import NeededVersion, ObjectNeeds, read_object
from hatch_aoti.errors import AotiError
from hatch_aoti.wheel.platform_tag import choose_tag, torch_platform_floor

TORCH = "manylinux_2_28_x86_64"


def needing(*versions, machine="x86_64", needed=("libtorch_cpu.so", "libgomp.so.1", "libstdc++.so.6", "libc.so.6")):
    """An object that needs the given (library, version, symbol)s."""
    return ObjectNeeds(
        machine, needed, tuple(NeededVersion(lib, version, (symbol,)) for lib, version, symbol in versions)
    )


OLD = needing(("libc.so.6", "GLIBC_2.14", "memcpy"), ("libstdc++.so.6", "GLIBCXX_3.4.21", "_ZNSt13runtime_errorC1EPKc"))


def choose(*objects, machine="x86_64", floor=TORCH, override=None, system="Linux"):
    return choose_tag(objects, system=system, machine=machine, torch_floor=floor, override=override)


def test_objects_that_need_nothing_new_get_torchs_own_tag():
    choice = choose(OLD)
    assert choice.tag == TORCH
    assert "torch's own tag" in choice.reason
    assert choice.lower == ""


def test_no_objects_at_all_get_torchs_own_tag():
    assert choose().tag == TORCH


def test_a_newer_glibc_symbol_sets_the_tag_and_is_named():
    choice = choose(OLD, needing(("libc.so.6", "GLIBC_2.34", "pthread_rwlock_rdlock")))
    assert choice.tag == "manylinux_2_34_x86_64"
    assert "pthread_rwlock_rdlock@GLIBC_2.34 (libc.so.6)" in choice.reason
    assert "the tag would be manylinux_2_28_x86_64" in choice.lower
    assert "\n" not in choice.reason


@pytest.mark.parametrize(
    ("version", "machine", "policy"),
    [
        ("GLIBCXX_3.4.24", "x86_64", "2_28"),
        ("GLIBCXX_3.4.25", "x86_64", "2_31"),
        ("GLIBCXX_3.4.28", "x86_64", "2_31"),
        ("GLIBCXX_3.4.29", "x86_64", "2_34"),
        ("GLIBCXX_3.4.30", "x86_64", "2_35"),
        ("GLIBCXX_3.4.32", "x86_64", "2_39"),
        ("CXXABI_1.3.12", "aarch64", "2_31"),
        ("CXXABI_1.3.14", "x86_64", "2_39"),
        ("CXXABI_TM_1", "x86_64", "2_28"),
        ("GCC_7.0.0", "x86_64", "2_28"),
        ("GCC_11.0", "aarch64", "2_34"),
        ("GCC_12.0.0", "x86_64", "2_35"),
        ("GCC_14.0.0", "aarch64", "2_39"),
        ("GLIBC_2.42", "x86_64", "2_42"),
        ("GLIBC_2.2.5", "x86_64", "2_28"),
        ("GLIBC_ABI_DT_RELR", "x86_64", "2_36"),
        ("GOMP_5.1", "x86_64", "2_28"),
    ],
)
def test_each_symbol_version_maps_to_the_oldest_published_policy_that_has_it(version, machine, policy):
    choice = choose(needing(("lib.so", version, "f"), machine=machine), machine=machine, floor=None)
    assert choice.tag == f"manylinux_{policy}_{machine}"


def test_what_would_lower_the_tag_names_the_next_level():
    choice = choose(
        needing(("libstdc++.so.6", "GLIBCXX_3.4.30", "wait"), ("libc.so.6", "GLIBC_2.34", "pthread_join")), OLD
    )
    assert choice.tag == "manylinux_2_35_x86_64"
    assert "without wait@GLIBCXX_3.4.30 (libstdc++.so.6) the tag would be manylinux_2_34_x86_64" in choice.lower
    assert "manylinux_2_28 image" in choice.lower


@pytest.mark.parametrize("version", ["GLIBCXX_3.4.99", "GLIBC_PRIVATE", "GCC_99.0.0"])
def test_a_version_that_no_policy_has_is_never_given_a_manylinux_tag(version):  # pypa/cibuildwheel#1929
    choice = choose(needing(("lib.so", version, "f")))
    assert choice.tag == "linux_x86_64"
    assert f"f@{version} (lib.so)" in choice.reason
    assert "public indexes refuse" in choice.reason


def test_torchs_floor_wins_over_older_objects():
    assert choose(OLD, floor="manylinux_2_34_x86_64").tag == "manylinux_2_34_x86_64"


def test_libraries_that_nobody_promises_are_reported():
    assert choose(needing(needed=("libc.so.6", "libmine.so.3", "libc10.so", "ld-linux-x86-64.so.2"))).foreign == (
        "libmine.so.3",
    )
    assert choose(OLD).foreign == ()


@pytest.mark.parametrize("override", ["manylinux_2_28_x86_64", "manylinux_2_40_x86_64", "linux_x86_64"])
def test_an_override_that_the_objects_allow_is_taken(override):
    choice = choose(OLD, override=override)
    assert choice.tag == override
    assert "set by `platform-tag`" in choice.reason


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("manylinux_2_28_x86_64", ["wait@GLIBCXX_3.4.30 (libstdc++.so.6)", "Write `manylinux_2_35_x86_64`"]),
        ("manylinux2014_x86_64", ["promises less", "GLIBCXX_3.4.30"]),
        ("manylinux_2_35_aarch64", ["no platform tag of a wheel built here"]),
        ("musllinux_1_2_x86_64", ["no platform tag of a wheel built here"]),
        ("macosx_14_0_x86_64", ["no platform tag of a wheel built here"]),
        ("win_amd64", ["no platform tag of a wheel built here"]),
        ("any", ["no platform tag of a wheel built here"]),
        ("manylinux_2_x86_64", ["no platform tag of a wheel built here"]),
        ("", ["no platform tag of a wheel built here"]),
    ],
)
def test_an_override_that_is_wrong_or_promises_too_little_is_refused(override, says):
    with pytest.raises(AotiError, match="`platform-tag`") as error:
        choose(needing(("libstdc++.so.6", "GLIBCXX_3.4.30", "wait")), override=override)
    for words in says:
        assert words in str(error.value)


def test_an_override_below_torchs_own_tag_is_refused():
    with pytest.raises(AotiError, match="torch itself needs manylinux_2_28_x86_64"):
        choose(OLD, override="manylinux_2_17_x86_64")


def test_an_override_of_an_object_that_no_policy_admits_is_refused_unless_it_is_linux():
    newest = needing(("libstdc++.so.6", "GLIBCXX_3.4.99", "f"))
    with pytest.raises(AotiError, match="Write `linux_x86_64`"):
        choose(newest, override="manylinux_2_40_x86_64")
    assert choose(newest, override="linux_x86_64").tag == "linux_x86_64"


def test_musl_is_refused_because_torch_has_no_wheels_for_it():
    with pytest.raises(AotiError, match=r"libc\.musl-x86_64\.so\.1.*not on Alpine"):
        choose(needing(needed=("libc.musl-x86_64.so.1",)))


def test_an_object_of_another_machine_is_refused():
    with pytest.raises(AotiError, match="is for aarch64, but the wheel is built on x86_64"):
        choose(needing(machine="aarch64"))


def test_a_machine_without_tags_is_refused():
    with pytest.raises(AotiError, match="no platform tag is known for linux on s390x"):
        choose(needing(machine="s390x"), machine="s390x")


@pytest.mark.parametrize(
    ("minos", "floor", "tag"),
    [
        ((11, 0), None, "macosx_11_0_arm64"),
        ((12, 3), None, "macosx_13_0_arm64"),
        ((12, 0), "macosx_14_0_arm64", "macosx_14_0_arm64"),
        ((15, 0), "macosx_14_0_arm64", "macosx_15_0_arm64"),
    ],
)
def test_macos_tag_comes_from_the_deployment_target_in_a_form_that_installers_know(minos, floor, tag):
    choice = choose(ObjectNeeds("arm64", min_macos=minos), system="Darwin", machine="arm64", floor=floor)
    assert choice.tag == tag
    assert tag in set(tags.mac_platforms((15, 0), "arm64"))


def test_macos_override_is_checked_like_that_of_linux():
    newer = ObjectNeeds("arm64", min_macos=(15, 0))
    where = {"system": "Darwin", "machine": "arm64", "floor": "macosx_14_0_arm64"}
    assert choose(newer, override="macosx_15_0_arm64", **where).tag == "macosx_15_0_arm64"
    with pytest.raises(AotiError, match=r"deployment target 15\.0.*Write `macosx_15_0_arm64`"):
        choose(newer, override="macosx_14_0_arm64", **where)
    with pytest.raises(AotiError, match="no platform tag of a wheel built here"):
        choose(newer, override="macosx_15_0_universal2", **where)


class FakeTorch:
    def __init__(self, *names):
        self.text = "Wheel-Version: 1.0\nRoot-Is-Purelib: false\n" + "".join(f"Tag: {name}\n" for name in names)

    def read_text(self, name):
        assert name == "WHEEL"
        return self.text


@pytest.mark.parametrize(
    ("names", "floor"),
    [
        (["cp311-cp311-manylinux_2_28_x86_64"], "manylinux_2_28_x86_64"),
        (["cp311-cp311-manylinux_2_31_x86_64", "cp311-cp311-manylinux_2_27_x86_64"], "manylinux_2_27_x86_64"),
        (["cp312-none-macosx_11_0_arm64"], "macosx_11_0_arm64"),
        (["cp311-cp311-linux_x86_64"], None),
        ([], None),
    ],
)
def test_torchs_floor_is_read_from_its_wheel_file(names, floor, monkeypatch):
    monkeypatch.setattr(metadata, "distribution", lambda _: FakeTorch(*names))
    assert torch_platform_floor() == floor


def test_without_torch_there_is_no_floor(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert torch_platform_floor() is None


def test_a_real_object_that_needs_a_future_glibc_gets_the_tag_of_that_glibc(tmp_path):
    (tmp_path / "stub.map").write_text("GLIBC_2.97 { global: future_call; };")
    (tmp_path / "stub.c").write_text("int future_call(void) { return 1; }")
    (tmp_path / "a.c").write_text(
        '__asm__(".symver mine, future_call@GLIBC_2.97");\nint mine(void);\nint f(void) { return mine(); }'
    )
    link = ["gcc", "-shared", "-fPIC", "-nostdlib"]
    stub = [*link, "-Wl,--version-script=stub.map", "-Wl,-soname,libc.so.6", "stub.c", "-o", "libstub.so"]
    for command in (stub, [*link, "a.c", "-L.", "-lstub", "-o", "a.so"]):
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    needs = read_object(tmp_path / "a.so")
    choice = choose(needs, machine=needs.machine, floor=None)
    assert choice.tag == f"manylinux_2_97_{needs.machine}"
    assert "future_call@GLIBC_2.97 (libc.so.6)" in choice.reason
