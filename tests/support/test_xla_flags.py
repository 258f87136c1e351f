"""Claims about the flags that tests give to XLA."""

from xla_flags import known_flags


def test_flag_that_an_xla_does_not_know_is_left_out():
    flags = {"xla_backend_optimization_level": "0", "xla_is_no_flag": "1"}
    assert known_flags(flags) == "--xla_backend_optimization_level=0"


def test_flag_of_which_only_the_description_is_left_is_left_out(
    tmp_path, monkeypatch
):
    (tmp_path / "__init__.py").touch()
    (tmp_path / "lib.so").write_bytes(b"\0xla_known\0\0\x12\x08xla_gone\x18")
    monkeypatch.setattr("xla_flags.LIBRARIES", {tmp_path.name: "lib.so*"})
    monkeypatch.syspath_prepend(tmp_path.parent)
    assert known_flags({"xla_known": "1", "xla_gone": "1"}) == "--xla_known=1"
