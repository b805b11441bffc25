"""Layouts: what a header says agrees with the compiler, what a build returns chooses a release, and all else is refused."""

from __future__ import annotations

import ctypes
import json
import random
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from isolate.errors import BuildError
from isolate.library import layout
from isolate.library.header import SIZES, STATE_FLAGS, Declarations, Field, parse, place, read_header
from isolate.library.layout import Layout, establish
from tests import stub_build
from tests.compile import COMPILER, ROOT

CONTEXT, MODEL, QUANTIZE = "llama_context_params", "llama_model_params", "llama_model_quantize_params"
NEWEST = "llama-cpp-python 0.3.36"

Structs = Mapping[str, Sequence[Field]]


def table(release: str = NEWEST) -> Declarations:
    """A release of the table."""
    return layout._table()[release]


def loaded(path: Path, structs: Structs, batch: str | None = None) -> ctypes.CDLL:
    """A stub libllama with these default params, loaded."""
    source = stub_build.source(structs) if batch is None else stub_build.source(structs, batch)
    return ctypes.CDLL(str(stub_build.library(path / "libllama.so", source)))


def changed(struct: str, change: Callable[[list[Field]], None], release: str = NEWEST) -> Structs:
    """The structs of a release, one of them changed and placed anew."""
    fields = list(table(release).structs[struct])
    change(fields)
    placed = place([(field.name, field.type) for field in fields])
    defaults = [replace(new, default=old.default) for new, old in zip(placed, fields, strict=True)]
    return {**table(release).structs, struct: defaults}


def with_default(fields: list[Field], name: str, default: float) -> None:
    """Changes a field's default."""
    index = next(i for i, field in enumerate(fields) if field.name == name)
    fields[index] = replace(fields[index], default=default)


def insert(fields: list[Field], before: str, name: str, kind: str, default: float = 0) -> None:
    """Inserts a field."""
    index = next(i for i, field in enumerate(fields) if field.name == before)
    fields.insert(index, Field(name, kind, 0, 0, default))


def two_pointers_more(fields: list[Field]) -> None:
    """A context struct no release has."""
    insert(fields, "embeddings", "one", "pointer")
    insert(fields, "embeddings", "two", "pointer")


def refusal(path: Path, structs: Structs, header: Path | None = None, batch: str | None = None) -> str:
    """The one sentence a stub with these structs is refused with."""
    with pytest.raises(BuildError) as caught:
        establish(loaded(path, structs, batch), header)
    assert "\n" not in caught.value.message
    return caught.value.message


# -- choosing a release


def distinct_releases() -> list[str]:
    """One release for each combination of layouts in the table that states its defaults."""
    seen: dict[str, str] = {}
    for release, declared in layout._table().items():
        if declared.structs[CONTEXT][0].default is not None:
            seen.setdefault(str({name: declared.structs[name] for name in (CONTEXT, MODEL, QUANTIZE)}), release)
    return list(seen.values())


def test_table_reaches_from_the_oldest_release_to_ones_newer_than_the_default_build() -> None:
    releases = list(layout._table())
    assert releases[-1] == "llama-cpp-python 0.3.9" and NEWEST in releases[1:] and len(releases) > 30
    assert len(distinct_releases()) >= 10


@pytest.mark.parametrize("release", distinct_releases())
def test_each_release_is_known_by_what_it_returns(tmp_path: Path, release: str) -> None:
    """A stub of the release is taken for it, or for one that places every field the same."""
    found = establish(loaded(tmp_path, table(release).structs), None)
    # A name that changed in place is nobody's to set; isolate sets none of those.
    assert release in found.releases and {struct for struct, _ in found.closed} <= {QUANTIZE}
    for name, fields in table(release).structs.items():
        mine = {field.name: field.offset for field in fields if (name, field.name) not in found.closed}
        theirs = {field: at for field, at in offsets(found, name).items() if (name, field) not in found.closed}
        assert theirs.items() <= mine.items() and len(theirs) >= len(mine) - 1
    assert release in found.source or " to " in found.source


def offsets(found: Layout, struct: str) -> dict[str, int]:
    """Field -> offset, as ctypes passes the struct."""
    made = found.structs[struct]
    return {name: getattr(made, name).offset for name, *_ in made._fields_}


def test_a_build_that_copies_its_defaults_whole_is_known_too(tmp_path: Path) -> None:
    """Padding is then written, as zeros: unoptimized builds do that."""
    source = stub_build.source(table().structs).replace(
        "_params *r) {", "_params *r) { __builtin_memset(r, 0, sizeof *r);"
    )
    found = establish(ctypes.CDLL(str(stub_build.library(tmp_path / "libllama.so", source))), None)
    assert NEWEST in found.releases and len(found.measured[MODEL].data) == 80


def test_embedded_build_by_its_own_header_and_by_the_table() -> None:
    """llama.h as llama-cpp-python installs it says what the table says of that release."""
    spec = find_spec("llama_cpp")
    assert spec and spec.origin
    header = Path(spec.origin).parent.parent / "include" / "llama.h"
    if not header.exists():
        pytest.skip("this llama-cpp-python was installed without llama.h")
    declared = read_header(header)
    for name, fields in table().structs.items():
        assert [(field.name, field.offset, field.size) for field in declared.structs[name]] == [
            (field.name, field.offset, field.size) for field in fields
        ]
    assert declared.enums[STATE_FLAGS] == table().enums[STATE_FLAGS]


def test_the_table_is_as_the_generator_writes_it() -> None:
    """No value in it was changed by hand into another form; what the values are, the stubs above show."""
    spec = spec_from_file_location("make_layouts", ROOT / "tools" / "make_layouts.py")
    assert spec and spec.loader
    generator = module_from_spec(spec)
    spec.loader.exec_module(generator)
    written = generator.TABLE.read_text()
    assert generator.text_of(json.loads(written)) == written


# -- what is refused without a header


def test_same_size_other_defaults(tmp_path: Path) -> None:
    """Two neighbours swapped: every size is right and every call would go wrong."""

    def swap(fields: list[Field]) -> None:
        with_default(fields, "n_batch", 512)
        with_default(fields, "n_ubatch", 2048)

    structs = changed(CONTEXT, swap)
    sentence = refusal(tmp_path, structs)
    assert (
        "fits no release isolate knows" in sentence and "n_batch at byte 4 reads 512 by default, not 2048" in sentence
    )
    assert "pass --include the llama.h it was made from" in sentence


def test_shifted_field_of_the_same_size(tmp_path: Path) -> None:
    """A field more and a field less: the struct is as large as the release's."""

    def shift(fields: list[Field]) -> None:
        insert(fields, "n_seq_max", "n_new", "uint32_t")
        fields.remove(next(field for field in fields if field.name == "defrag_thold"))

    structs = changed(CONTEXT, shift)
    assert structs[CONTEXT][-1].offset + 8 == 160
    assert "n_seq_max at byte 12 reads 0 by default, not 1" in refusal(tmp_path, structs)


def test_larger_struct(tmp_path: Path) -> None:
    structs = changed(CONTEXT, two_pointers_more)
    sentence = refusal(tmp_path, structs)
    assert "llama_context_params 176" in sentence and "pass --include" in sentence


def test_a_field_in_what_was_padding(tmp_path: Path) -> None:
    """The bytes after the bools are padding in every release; a build that writes them has a field there."""
    structs = changed(CONTEXT, lambda fields: insert(fields, "samplers", "new_switch", "bool"))
    assert structs[CONTEXT][-1].offset + 8 == 160
    assert "the build writes byte 134, which is padding there" in refusal(tmp_path, structs)


def test_a_field_that_is_not_written(tmp_path: Path) -> None:
    """Padding where a field should be, at the right size."""
    source = stub_build.source(table().structs)
    assert "r->no_host = 0;" in source
    stub = stub_build.library(tmp_path / "libllama.so", source.replace("r->no_host = 0;", ""))
    with pytest.raises(BuildError, match=r"the build leaves bytes of no_host \(at 75\) unwritten"):
        establish(ctypes.CDLL(str(stub)), None)


def test_another_batch(tmp_path: Path) -> None:
    assert "llama_batch is unknown to isolate" in refusal(
        tmp_path, table().structs, batch="result.embd = (float *) tokens;"
    )


def test_a_libllama_without_default_params(tmp_path: Path) -> None:
    structs = {name: fields for name, fields in table().structs.items() if name != CONTEXT}
    assert "has no llama_context_default_params" in refusal(tmp_path, structs)


def test_unknown_quantize_params_close_only_quantizing(tmp_path: Path) -> None:
    structs = changed(QUANTIZE, lambda fields: insert(fields, "ftype", "one", "uint32_t", 7))
    found = establish(loaded(tmp_path, structs), None)
    assert CONTEXT in found.structs and QUANTIZE not in found.structs
    assert "pass --include" in found.closed[QUANTIZE, ""]


def test_two_releases_that_fit_and_place_a_field_differently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """n_rs_seq and n_outputs_max are both 0 by default: nothing measured says which comes first."""
    declared = table()
    fields = list(declared.structs[CONTEXT])
    fields[4], fields[5] = replace(fields[4], name="n_outputs_max"), replace(fields[5], name="n_rs_seq")
    swapped = replace(declared, structs={**declared.structs, CONTEXT: tuple(fields)})
    monkeypatch.setattr(layout, "_table", lambda: {"release one": declared, "release two": swapped})
    sentence = refusal(tmp_path, declared.structs)
    assert sentence == (
        "llama_context_params.n_rs_seq is at byte 16 in release one and at 20 in release two, and this libllama fits both: "
        "pass --include the llama.h it was made from"
    )


def test_a_field_that_only_one_of_two_fitting_releases_has_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared = table()
    fields = list(declared.structs[CONTEXT])
    fields[4] = replace(fields[4], name="n_other")
    renamed = replace(declared, structs={**declared.structs, CONTEXT: tuple(fields)})
    monkeypatch.setattr(layout, "_table", lambda: {"release one": declared, "release two": renamed})
    found = establish(loaded(tmp_path, declared.structs), None)
    assert found.releases == ("release one", "release two")
    assert list(found.closed) == [(CONTEXT, "n_rs_seq")]
    assert "release one has it and release two does not" in found.closed[CONTEXT, "n_rs_seq"]


# -- the header


def header_of(path: Path, structs: Structs) -> Path:
    """A llama.h that declares these structs."""
    text = "enum ggml_type { GGML_TYPE_F32 };\n"
    for name, fields in structs.items():
        text += f"struct {name} {{\n" + "".join(f"    {declared(field)}; // one\n" for field in fields) + "};\n"
    (path / "llama.h").write_text(text)
    return path / "llama.h"


def declared(field: Field) -> str:
    """A field's declaration in C."""
    return f"{'const void *' if field.type == 'pointer' else field.type} {field.name}"


def test_header_of_a_build_no_release_is_like(tmp_path: Path) -> None:
    """What the table refuses, the right header drives: the same stub as for the larger struct."""
    structs = changed(CONTEXT, two_pointers_more)
    header = header_of(tmp_path, structs)
    found = establish(loaded(tmp_path, structs), header)
    assert offsets(found, CONTEXT)["embeddings"] == 128 + 16
    assert str(header) in found.source and not found.releases


def test_header_of_another_release(tmp_path: Path) -> None:
    header = header_of(tmp_path, table("llama-cpp-python 0.3.16").structs)
    sentence = refusal(tmp_path, table().structs, header)
    assert f"{header} is not the llama.h this libllama was made from, by struct llama_model_params" in sentence
    assert "the build writes 78 bytes, not 69" in sentence and "pass --include the right one" in sentence


def test_header_of_the_same_size_with_fields_swapped(tmp_path: Path) -> None:
    """The defaults that releases give to fields of these names show that the header is not the build's."""

    def swap(fields: list[Field]) -> None:
        fields[0], fields[1] = fields[1], fields[0]

    header = header_of(tmp_path, changed(CONTEXT, swap))
    assert "n_batch at byte 0 reads 512 by default, not 2048" in refusal(tmp_path, table().structs, header)


def test_defaults_in_the_source_beside_the_header_are_what_is_expected(tmp_path: Path) -> None:
    """A fork with a default of its own is driven by its source tree, and refused by a header alone."""
    structs = changed(CONTEXT, lambda fields: with_default(fields, "n_ubatch", 1024))
    (tmp_path / "include").mkdir()
    (tmp_path / "src").mkdir()
    header = header_of(tmp_path / "include", structs)
    assert "n_ubatch at byte 8 reads 1024 by default, not 512" in refusal(tmp_path, structs, header)
    values = ",\n".join(
        f"/*.{field.name} =*/ {field.default:g}{'.0f' if field.type == 'float' else ''}" for field in structs[CONTEXT]
    )
    source = f"llama_context_params llama_context_default_params() {{\n llama_context_params result = {{\n{values}\n}};\n return result; }}"
    (tmp_path / "src" / "llama-context.cpp").write_text(source)
    assert establish(loaded(tmp_path / "again", structs), header).source


def test_placing_agrees_with_the_compiler(tmp_path: Path) -> None:
    """Random fields of every type that is known: cc's offsetof says the same."""
    chance = random.Random(2)
    kinds = [*SIZES, "enum ggml_type"]
    structs = {
        f"s{i}": place([(f"f{j}", chance.choice(kinds)) for j in range(chance.randint(1, 30))]) for i in range(40)
    }
    program = "#include <stddef.h>\n#include <stdint.h>\n#include <stdio.h>\n#include <stdbool.h>\n"
    program += header_of(tmp_path, structs).read_text() + "int main(void) {\n"
    program += "".join(
        f'printf("%zu\\n", offsetof(struct {name}, {field.name}));' for name in structs for field in structs[name]
    )
    binary = tmp_path / "offsets"
    subprocess.run([COMPILER, "-x", "c", "-", "-o", str(binary)], input=program + "}", text=True, check=True)
    said = subprocess.run([str(binary)], capture_output=True, text=True, check=True).stdout.split()
    assert [int(line) for line in said] == [field.offset for fields in structs.values() for field in fields]


HEADER = """
#pragma once
#define LLAMA_STATE_SEQ_FLAGS_NONE 0
#define LLAMA_STATE_SEQ_FLAGS_ON_DEVICE 2 /* a remark */
typedef int32_t my_number;
typedef struct other * my_handle;
typedef bool (*my_callback)(float progress, void * user_data);
enum llama_split_mode { LLAMA_SPLIT_MODE_NONE = 0, LLAMA_SPLIT_MODE_LAYER, // one
    LLAMA_SPLIT_MODE_ROW = 1 << 3, LLAMA_SPLIT_MODE_LAST = LLAMA_SPLIT_MODE_ROW, LLAMA_SPLIT_MODE_NEGATIVE = -1 };
enum llama_unused { LLAMA_UNUSED = 1 };
struct llama_model_params {
    my_handle handle; /* struct llama_model_params { int no; } */
    enum llama_split_mode split_mode;
    my_number number;
    const struct llama_model_kv_override * overrides;
    my_callback callback;
    bool vocab_only;
};
typedef struct llama_context_params { uint32_t n_ctx; } llama_context_params;
"""


def test_reading_declarations() -> None:
    found = parse(HEADER, "llama.h")
    assert [(field.name, field.type, field.offset) for field in found.structs[MODEL]] == [
        ("handle", "pointer", 0),
        ("split_mode", "enum llama_split_mode", 8),
        ("number", "int32_t", 12),
        ("overrides", "pointer", 16),
        ("callback", "pointer", 24),
        ("vocab_only", "bool", 32),
    ]
    assert found.enums == {
        "llama_split_mode": {
            "LLAMA_SPLIT_MODE_NONE": 0, "LLAMA_SPLIT_MODE_LAYER": 1, "LLAMA_SPLIT_MODE_ROW": 8, "LLAMA_SPLIT_MODE_LAST": 8,
            "LLAMA_SPLIT_MODE_NEGATIVE": -1,
        },
        STATE_FLAGS: {"LLAMA_STATE_SEQ_FLAGS_NONE": 0, "LLAMA_STATE_SEQ_FLAGS_ON_DEVICE": 2},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "x.h does not define struct llama_model_params: pass --include the llama.h"),
        (
            "struct llama_model_params {\n#ifdef X\nint a;\n#endif\n};",
            "struct llama_model_params in x.h depends on the preprocessor",
        ),
        ("struct llama_model_params { struct inner value; };", "does not know the type in 'struct inner value'"),
        ("struct llama_model_params { long double value; };", "does not know the type in 'long double value'"),
        ("struct llama_model_params { int values[4]; };", "does not know the type in 'int values[4]'"),
        ("struct llama_model_params { int a, b; };", "does not know the type in 'int a, b'"),
        ("struct llama_model_params { unsigned flag : 1; };", "does not know the type in 'unsigned flag : 1'"),
    ],
)
def test_a_header_that_cannot_be_read(text: str, said: str) -> None:
    with pytest.raises(BuildError) as caught:
        parse(text, "x.h")
    assert said in caught.value.message


def test_a_header_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="cannot be read"):
        read_header(tmp_path / "llama.h")
