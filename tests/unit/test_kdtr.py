from __future__ import annotations

import json
import pickle
import resource
import time
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import safetensors
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from kdgen.errors import WeightError
from kdgen.weights.header import read_header
from kdgen.weights.kdtr import KdtrMetadata, TensorInfo, kdtr_metadata, open_kdtr, write_kdtr, write_kdtr_parts

Tensor = npt.NDArray[np.generic]
METADATA = KdtrMetadata("packed", '{"name": "tiny"}', '{"w": "mma_a"}')


def example() -> tuple[list[TensorInfo], list[tuple[str, Tensor]]]:
    rng = np.random.default_rng(0)
    infos = [
        TensorInfo("bytes", "u8", (3,)),
        TensorInfo("layers.0.w", "bf16", (2, 3)),
        TensorInfo("größe", "f32", ()),
        TensorInfo("none", "i32", (0, 4)),
        TensorInfo("ids", "i32", (5,)),
        TensorInfo("exact", "f64", (2, 2)),
    ]
    kinds = {"u8": np.uint8, "bf16": ml_dtypes.bfloat16, "f32": np.float32, "i32": np.int32, "f64": np.float64}
    return infos, [(i.name, np.asarray(rng.integers(0, 100, i.shape)).astype(kinds[i.dtype]).reshape(i.shape)) for i in infos]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.kdtr"
    write_kdtr(path, *example(), METADATA)
    return path


def test_round_trip(file: Path) -> None:
    opened = open_kdtr(file)
    infos, tensors = example()
    assert opened.metadata == METADATA
    assert [t for t in opened.tensors if t.nbytes] == [i for i in infos if i.nbytes]
    for name, values in tensors:
        assert name in opened
        got = opened[name]
        assert got.dtype == values.dtype and got.shape == values.shape and np.array_equal(got, values)
        assert not got.flags.writeable
    assert "other" not in opened
    with pytest.raises(WeightError, match="no tensor 'other'"):
        opened["other"]


def test_any_safetensors_reader_opens_it(file: Path) -> None:
    with safetensors.safe_open(file, framework="numpy") as reader:
        assert reader.metadata()["format"] == "kdtr" and json.loads(reader.metadata()["spec"]) == {"name": "tiny"}
    loaded = safetensors.numpy.load_file(file)
    for name, values in example()[1]:
        assert np.array_equal(loaded[name], values) and loaded[name].shape == values.shape


def test_files_of_other_writers_are_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    safetensors.numpy.save_file({"b": np.arange(6, dtype=np.float16).reshape(2, 3), "a": np.zeros(3, np.int64)}, path, {"format": "pt"})
    header = read_header(path)
    assert {(t.name, t.dtype, t.shape, t.nbytes) for t in header.tensors} == {("a", "I64", (3,), 24), ("b", "F16", (2, 3), 12)}
    with pytest.raises(WeightError, match=r"not a \.kdtr file"):
        open_kdtr(path)


def test_writing_needs_memory_for_one_tensor(tmp_path: Path) -> None:
    infos = [TensorInfo(f"t{i}", "f32", (1 << 18,)) for i in range(32)]

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for info in infos:
            yield info.name, np.full(info.shape, 1, np.float32)

    tracemalloc.start()
    write_kdtr(tmp_path / "big.kdtr", infos, tensors(), METADATA)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (tmp_path / "big.kdtr").stat().st_size > 32 << 20
    assert peak < 4 << 20


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t[:-1], "'exact' is missing"),
        (lambda t: [*t, ("more", np.zeros(1, np.float32))], "'more' was not announced"),
        (lambda t: [t[1], t[0], *t[2:]], "came where 'bytes' was announced"),
        (lambda t: [("bytes", np.zeros(3, np.int8)), *t[1:]], "'bytes' is int8"),
        (lambda t: [("bytes", np.zeros(4, np.uint8)), *t[1:]], r"'bytes' is uint8 \(4,\)"),
    ],
)
def test_tensors_that_are_not_as_announced(tmp_path: Path, change: object, reason: str) -> None:
    infos, tensors = example()
    path = tmp_path / "tiny.kdtr"
    path.write_text("the file before")
    with pytest.raises(WeightError, match=reason):
        write_kdtr(path, infos, change(tensors), METADATA)  # type: ignore[operator]
    assert path.read_text() == "the file before"
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.kdtr"]


def test_nothing_remains_when_the_source_fails(tmp_path: Path) -> None:
    def tensors() -> Iterator[tuple[str, Tensor]]:
        yield example()[1][0]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_kdtr(tmp_path / "tiny.kdtr", example()[0], tensors(), METADATA)
    assert list(tmp_path.iterdir()) == []


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "x.kdtr"
    old, folder, other = (tmp_path / f".{name}.tmp" for name in (f"x.kdtr.{'0' * 32}", f"x.kdtr.{'2' * 32}", "x.kdtr.mine"))
    for file in (old, other):
        file.touch()
    folder.mkdir()
    (folder / "shard").touch()
    write_kdtr(path, *example(), METADATA)
    assert set(tmp_path.iterdir()) == {path, other}


def test_names_must_differ(tmp_path: Path) -> None:
    for names in (["a", "a"], ["__metadata__"]):
        infos = [TensorInfo(name, "u8", (1,)) for name in names]
        with pytest.raises(WeightError, match="taken twice"):
            write_kdtr(tmp_path / "x.kdtr", infos, [(name, np.zeros(1, np.uint8)) for name in names], METADATA)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match=r"nowhere/x\.kdtr: cannot be written"):
        write_kdtr(tmp_path / "nowhere" / "x.kdtr", *example(), METADATA)


def with_header(content: bytes, data: bytes = b"") -> bytes:
    return len(content).to_bytes(8, "little") + content + data


ONE = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not a safetensors file"),
        (b"12345678", "not a safetensors file"),
        (b"PK\x03\x04" + bytes(100), "not a safetensors file"),
        (pickle.dumps({"a": [1.0] * 100}), "not a safetensors file"),
        (b"\xff" * 64, "not a safetensors file"),
        (with_header(b"not json"), "header is not JSON"),
        (with_header(b"\xff\xfe  "), "header is not JSON"),
        (with_header(b"[" * 100_000), "header is not JSON"),
        (with_header(b'{"a":1,"a":2}'), "a key appears twice"),
        (with_header(b"[1, 2]"), "not a JSON object"),
        (with_header(b'{"__metadata__":{"a":1}}'), "table of strings"),
        (with_header(b'{"a": 3}'), "'shape' of tensor 'a'"),
        (with_header(ONE.replace(b"[2]", b"[-2]"), bytes(8)), "'shape' of tensor 'a'"),
        (with_header(ONE.replace(b"[2]", b"[true]"), bytes(8)), "'shape' of tensor 'a'"),
        (with_header(ONE.replace(b"[2]", b"[2.0]"), bytes(8)), "'shape' of tensor 'a'"),
        (with_header(ONE.replace(b"[2]", b"[1e999]"), bytes(8)), "'shape' of tensor 'a' is .inf."),
        (
            with_header(ONE.replace(b"[2]", b"[%s]" % (b"7" * 4300)), bytes(8)),
            r"'shape' of tensor 'a' is \[77777777777777",
        ),
        (with_header(ONE.replace(b"[2]", b"[%s]" % (b"7" * 5000)), bytes(8)), "header is not JSON .Exceeds the limit"),
        (with_header(ONE.replace(b"[2]", b"[9223372036854775808]"), bytes(8)), "'shape' of tensor 'a' is .9223372036854775808."),
        (with_header(ONE.replace(b"[2]", b"[%s1]" % (b"1," * 40)), bytes(8)), "'shape' of tensor 'a' is .1, 1, "),
        (with_header(ONE.replace(b'"a"', b'"%s"' % (b"a" * 1001)), bytes(8)), "a tensor's name has 1001 characters: 'aaa"),
        (with_header(ONE.replace(b"F32", b"F99"), bytes(8)), "unknown dtype 'F99'"),
        (with_header(ONE.replace(b'"F32"', b"[]"), bytes(8)), "unknown dtype"),
        (with_header(ONE.replace(b"[2]", b"[3]"), bytes(8)), "does not fit its shape"),
        (with_header(ONE.replace(b"[0,8]", b"[8,0]"), bytes(8)), "does not fit its shape"),
        (with_header(ONE.replace(b"[0,8]", b"[8,16]"), bytes(16)), "does not begin where"),
        (with_header(ONE, bytes(7)), "cut off: .* describes"),
        (with_header(ONE, bytes(9)), "damaged: .* describes"),
        (with_header(ONE, bytes(8)), r"not a \.kdtr file"),
        (with_header(b'{"__metadata__":{"format":"kdtr","format_version":"3"}}'), "this kdgen reads formats 1 and 2"),
        (with_header(b'{"__metadata__":{"format":"kdtr"}}'), "format unknown"),
        (with_header(b'{"__metadata__":{"format":"kdtr","format_version":"1","kind":"x","spec":"{}"}}'), "no 'layout'"),
        (with_header(b'{"__metadata__":{"format":"kdtr","format_version":"1","kind":"x","spec":"{","layout":"{}"}}'), "'spec' is not JSON"),
        (
            with_header(
                b'{"__metadata__":{"format":"kdtr","format_version":"1","kind":"x","spec":"{}","layout":"{}"},'
                b'"a":{"dtype":"F16","shape":[1],"data_offsets":[0,2]}}',
                bytes(2),
            ),
            "F16, which .kdtr files do not use",
        ),
    ],
)
def test_damaged_and_foreign_files(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "bad.kdtr"
    path.write_bytes(content)
    with pytest.raises(WeightError, match=reason) as caught:
        open_kdtr(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < len(str(path)) + 300


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{" + b",".join(b'"%d":0' % i for i in range(3_000_000)) + b"}", "it has more than 5000000 values"),
        (ONE.replace(b'"a"', b'"%s"' % (b"a" * 90_000_000)), "a tensor's name has 90000000 characters: 'aaa"),
        (ONE.replace(b"F32", b"a" * 20_000_000), "has unknown dtype 'aaa"),
        (ONE.replace(b"[2]", b"[%s1]" % ((b"9" * 4299 + b",") * 3000)), "'shape' of tensor 'a'"),
        (
            b"{" + b",".join(b'"%d"' % i + ONE[4:-1].replace(b"[2]", b"[%s1]" % (b"9999999999," * 20)) for i in range(9999)) + b"}",
            "does not fit its shape",
        ),
    ],
    ids=["entries", "name", "dtype", "integers", "products"],
)
def test_large_headers_are_refused_soon(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(with_header(content, bytes(8)))
    del content
    began, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(WeightError, match=reason) as caught:
        read_header(path)
    assert time.process_time() - began < 3 and len(str(caught.value)) < len(str(path)) + 300
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 2**20, "KiB"


def test_missing_files_and_directories(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.kdtr"):
        with pytest.raises(WeightError, match="cannot be read"):
            open_kdtr(path)


@given(st.data())
def test_whatever_is_damaged_is_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("damage") / "x.kdtr"
    write_kdtr(path, *example(), METADATA)
    written = path.read_bytes()
    content = bytearray(written)
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
        path.write_bytes(content)
        with pytest.raises(WeightError):
            open_kdtr(path)
        return
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    if bytes(content) == written:
        return
    with pytest.raises(WeightError, match=r"x\.kdtr: "):
        open_kdtr(path).verify()


def test_metadata_of_a_header(file: Path) -> None:
    assert kdtr_metadata(read_header(file)) == METADATA


def test_checksums_of_pieces_that_do_not_end_with_the_parts_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of several pieces, written in parts of other sizes; each flipped bit is found, and named with its tensor and piece."""
    monkeypatch.setattr("kdgen.weights.kdtr.PIECE_BYTES", 64)
    path, rng = tmp_path / "x.kdtr", np.random.default_rng(0)
    infos = [TensorInfo(name, "f32", (count,)) for name, count in (("a", 75), ("b", 16), ("none", 0), ("c", 1))]
    values = {info.name: rng.standard_normal(info.shape, np.float32) for info in infos}

    def parts() -> Iterator[tuple[str, Tensor]]:
        for name, whole in values.items():
            for at in range(0, len(whole), 11):
                yield name, whole[at : at + 11]

    write_kdtr_parts(path, infos, parts(), METADATA)
    once = path.read_bytes()
    write_kdtr(path, infos, values.items(), METADATA)
    assert path.read_bytes() == once, "how it was cut shows nowhere"
    opened = open_kdtr(path)
    opened.verify()
    checksums = json.loads(read_header(path).metadata["checksums"])["tensors"]
    assert {name: len(text) // 8 for name, text in checksums.items()} == {"a": 5, "b": 1, "none": 0, "c": 1}
    assert checksums["b"] == f"{zlib.crc32(values['b'].tobytes()):08x}"
    begins: list[int] = []
    for name, whole in values.items():
        begins.clear()
        assert b"".join(part.tobytes() for part in opened.parts(name, lambda at, _: begins.append(at))) == whole.tobytes()
        assert sorted(begins) == list(range(0, whole.nbytes, 64)), "one block a piece"
    start = read_header(path).tensors[0].begin
    for byte, where in (
        (start + 130, "bytes 128 to 191 of tensor a"),
        (start + 300, "bytes 0 to 63 of tensor b"),
        (len(once) - 1, "tensor c"),
    ):
        damaged = bytearray(once)
        damaged[byte] ^= 0x10
        path.write_bytes(damaged)
        with pytest.raises(WeightError, match=f"{where} are not those that were written"):
            open_kdtr(path).verify()
    for right, wrong in ((b"tiny", b"tony"), (b'"F32","shape":[16]', b'"I32","shape":[16]'), (b'"shape":[16]', b'"shape":[4,4]')):
        longer = int.from_bytes(once[:8], "little") + len(wrong) - len(right)
        path.write_bytes(longer.to_bytes(8, "little") + once[8:].replace(right, wrong, 1))
        assert right in once
        with pytest.raises(WeightError, match="its header is not what was written"):
            open_kdtr(path)


def test_files_without_checksums_are_read_and_cannot_be_verified(tmp_path: Path) -> None:
    path = tmp_path / "old.kdtr"
    metadata = {"format": "kdtr", "format_version": "1", "kind": "packed", "spec": "{}", "layout": "{}"}
    safetensors.numpy.save_file({"a": np.arange(3, dtype=np.float32)}, path, metadata)
    opened = open_kdtr(path)
    assert not opened.has_checksums and np.concatenate(list(opened.parts("a"))).tolist() == [0, 1, 2]
