"""The catalog: what is entered is found, and packs alone are enough to make it again."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mergegit.errors import UnusableRepository
from mergegit.objects import Tensor, TensorId
from mergegit.storage.catalog import Catalog, DamagedCatalog, PackFile, Place
from mergegit.storage.location import Location
from mergegit.storage.pack import Compression, Encoding, Header, Kind, scan
from mergegit.storage.store import Store
from tests.storage.samples import an_id, commit, put, record, some_bytes

NOTHING = {"packs": 0, "blocks": 0, "objects": 0, "statistics": 0}


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with closing(Catalog(tmp_path / "catalog")) as catalog:
        yield catalog


def a_pack(number: int, length: int = 1000) -> PackFile:
    return PackFile(number.to_bytes(16, "big").hex(), length)


def header(key: int, kind: Kind = Kind.SEGMENT, **fields: object) -> Header:
    return record(key, b"payload", kind, **fields)[0]


def enter(catalog: Catalog, pack: PackFile, *headers: Header) -> None:
    """Enter a pack of records at offsets 100, 200, ..."""
    catalog.enter({pack: [(header, 100 * place) for place, header in enumerate(headers, 1)]})


def layer(number: int, layers: int, key: int = 1, base: int = 9) -> Header:
    return header(key, base=an_id(base), encoding=Encoding.DELTA, layer=number, layers=layers)


def contents(catalog: Catalog) -> dict[str, Any]:
    """All that a catalog says, with packs by name: their numbers are its own affair."""
    names = {number: pack.name for number, pack in catalog.packs().items()}

    def named(place: Place) -> tuple[str | None, Place]:
        return names.get(place.pack), replace(place, pack=0)

    def form(found: Any) -> tuple[Any, ...]:
        return found.encoding, found.dtype, found.base, tuple(map(named, found.places))

    return {
        "packs": sorted(catalog.packs().values(), key=lambda pack: pack.name),
        "blocks": {block: sorted(map(form, forms)) for block, forms in catalog.blocks()},
        "objects": {key: named(place) for key, place in catalog.objects()},
        "statistics": {
            pair: named(place)
            for pair in catalog.all_statistics()
            if (place := catalog.statistics(*pair)) is not None
        },
    }


# -- entering and finding -------------------------------------------------------------------------


def test_a_new_catalog_knows_nothing(catalog: Catalog) -> None:
    assert catalog.counts() == NOTHING
    assert catalog.packs() == {}
    assert catalog.pack(1) is None
    assert catalog.forms(an_id(1)) == []
    assert catalog.object(an_id(1)) is None
    assert catalog.statistics(an_id(1), an_id(2)) is None
    assert list(catalog.blocks()) == list(catalog.objects()) == list(catalog.all_statistics()) == []


def test_a_raw_block_is_found_where_it_lies(catalog: Catalog) -> None:
    enter(catalog, a_pack(1), header(7), header(1, dtype=11, length=5, size=6))
    (form,) = catalog.forms(an_id(1))
    (place,) = form.places
    assert (form.encoding, form.dtype, form.base) == (Encoding.RAW, 11, bytes(32))
    assert (place.offset, place.length, place.size) == (200, 5, 6)
    assert catalog.pack(place.pack) == a_pack(1)
    assert (form.is_complete, form.nbytes) == (True, 5)


def test_an_object_is_found_where_it_lies(catalog: Catalog) -> None:
    enter(catalog, a_pack(1), header(3, Kind.OBJECT, compression=Compression.ZSTD))
    place = catalog.object(an_id(3))
    assert place is not None
    assert (place.offset, place.compression) == (100, Compression.ZSTD)
    assert [key for key, _ in catalog.objects()] == [an_id(3)]


def test_what_a_tensor_was_measured_against_is_listed(catalog: Catalog) -> None:
    pairs = [(3, 5), (3, 4), (2, 4), (4, 3)]
    headers = [header(t, Kind.STATISTICS, base=an_id(base)) for t, base in pairs]
    enter(catalog, a_pack(1), *headers)
    assert set(catalog.measured_against(an_id(3))) == {an_id(4), an_id(5)}
    assert catalog.measured_against(an_id(2)) == [an_id(4)]
    assert catalog.measured_against(an_id(5)) == []


def test_statistics_are_found_by_both_tensors(catalog: Catalog) -> None:
    enter(
        catalog,
        a_pack(1),
        header(3, Kind.STATISTICS, base=an_id(4)),
        header(3, Kind.STATISTICS, base=an_id(5)),
    )
    places = [catalog.statistics(an_id(3), an_id(base)) for base in (4, 5, 6)]
    assert [place and place.offset for place in places] == [100, 200, None]
    assert list(catalog.all_statistics()) == [(an_id(3), an_id(4)), (an_id(3), an_id(5))]


def test_kinds_do_not_answer_for_one_another(catalog: Catalog) -> None:
    enter(catalog, a_pack(1), header(1, Kind.OBJECT), header(2), header(3, Kind.STATISTICS))
    assert catalog.forms(an_id(1)) == []
    assert catalog.object(an_id(2)) is None
    assert catalog.object(an_id(3)) is None
    assert catalog.counts() == {"packs": 1, "blocks": 1, "objects": 1, "statistics": 1}


def test_large_numbers_are_kept(catalog: Catalog) -> None:
    big = header(1, Kind.OBJECT, length=(1 << 32) - 1, size=(1 << 32) - 1)
    catalog.enter({a_pack(1, 1 << 40): [(big, 1 << 39)]})
    place = catalog.object(an_id(1))
    assert place is not None
    assert (place.offset, place.length, place.size) == (1 << 39, (1 << 32) - 1, (1 << 32) - 1)
    assert catalog.packs() == {place.pack: a_pack(1, 1 << 40)}


def test_many_blocks_are_asked_for_at_once(catalog: Catalog) -> None:
    enter(catalog, a_pack(1), *(header(key) for key in range(50)))
    found = catalog.forms_of([an_id(key) for key in (3, 49, 99, 3)])
    assert {block: forms[0].places[0].offset for block, forms in found.items()} == {
        an_id(3): 400,
        an_id(49): 5000,
    }
    assert catalog.forms_of([]) == {}


# -- entering again -------------------------------------------------------------------------------


def test_entering_a_pack_again_changes_nothing(catalog: Catalog) -> None:
    headers = [header(1), layer(0, 2, key=2), header(3, Kind.OBJECT), header(4, Kind.STATISTICS)]
    enter(catalog, a_pack(1), *headers)
    before = contents(catalog)
    enter(catalog, a_pack(1), *headers)
    assert contents(catalog) == before


def test_a_second_copy_of_a_block_leaves_the_first_in_place(catalog: Catalog) -> None:
    enter(catalog, a_pack(1), header(1))
    before = catalog.forms(an_id(1))
    enter(catalog, a_pack(2), header(7), header(1))
    assert catalog.forms(an_id(1)) == before
    assert catalog.counts()["packs"] == 2


def test_an_error_while_entering_leaves_nothing(catalog: Catalog) -> None:
    def records() -> Iterable[tuple[Header, int]]:
        yield header(1), 100
        raise OSError("unreadable")

    with pytest.raises(OSError, match="unreadable"):
        catalog.enter({a_pack(1): records()})
    assert catalog.counts() == NOTHING


# -- layers ---------------------------------------------------------------------------------------


@settings(max_examples=12, deadline=None)
@given(st.permutations(range(4)))
def test_layers_in_several_packs_are_one_form_when_all_are_there(
    tmp_path_factory: pytest.TempPathFactory, order: list[int]
) -> None:
    with closing(Catalog(tmp_path_factory.mktemp("catalog") / "catalog")) as catalog:
        for count, number in enumerate(order):
            assert catalog.forms(an_id(1)) == [], f"{count} of 4 layers"
            assert catalog.forms_of([an_id(1)]) == {}
            enter(catalog, a_pack(number + 1, 1000 + number), layer(number, 4))
        (form,) = catalog.forms(an_id(1))
        assert (form.encoding, form.base) == (Encoding.DELTA, an_id(9))
        packs = [catalog.pack(place.pack) for place in form.places]
        assert packs == [a_pack(number + 1, 1000 + number) for number in range(4)]
        assert form.nbytes == 4 * len(b"payload")


def test_layers_in_one_pack_are_one_form(catalog: Catalog) -> None:
    enter(catalog, a_pack(1), layer(1, 2), layer(0, 2))
    (form,) = catalog.forms(an_id(1))
    assert [place.offset for place in form.places] == [200, 100]


def test_layers_entered_at_once_from_several_packs_are_one_form(catalog: Catalog) -> None:
    catalog.enter({a_pack(number): [(layer(number, 3), 100)] for number in range(3)})
    (form,) = catalog.forms(an_id(1))
    assert len({place.pack for place in form.places}) == 3


def test_incomplete_layers_are_seen_by_checks_alone(catalog: Catalog) -> None:
    enter(catalog, a_pack(1), layer(0, 2))
    assert [(block, [form.is_complete for form in forms]) for block, forms in catalog.blocks()] == [
        (an_id(1), [False])
    ]


def test_a_raw_form_stands_beside_a_delta(catalog: Catalog) -> None:
    enter(catalog, a_pack(1), layer(0, 2), layer(1, 2))
    enter(catalog, a_pack(2), header(1))
    assert {form.encoding for form in catalog.forms(an_id(1))} == {Encoding.RAW, Encoding.DELTA}


def test_an_incomplete_delta_does_not_hide_the_raw_form(catalog: Catalog) -> None:
    enter(catalog, a_pack(1), layer(0, 2), header(1))
    assert [form.encoding for form in catalog.forms(an_id(1))] == [Encoding.RAW]


def test_deltas_against_two_bases_are_two_forms(catalog: Catalog) -> None:
    enter(catalog, a_pack(1), layer(0, 2, base=8), layer(1, 2, base=9))
    assert catalog.forms(an_id(1)) == []
    enter(catalog, a_pack(2), layer(1, 2, base=8))
    assert [form.base for form in catalog.forms(an_id(1))] == [an_id(8)]
    enter(catalog, a_pack(3), layer(0, 2, base=9))
    assert {form.base for form in catalog.forms(an_id(1))} == {an_id(8), an_id(9)}


# -- dropping -------------------------------------------------------------------------------------


def number_of(catalog: Catalog, pack: PackFile) -> int:
    (number,) = [number for number, known in catalog.packs().items() if known == pack]
    return number


def test_a_dropped_pack_is_forgotten_with_its_blocks(catalog: Catalog) -> None:
    enter(catalog, a_pack(1), header(1), layer(0, 2, key=2), layer(1, 2, key=2))
    enter(catalog, a_pack(2), header(3))
    dropped = [header(1), layer(0, 2, key=2), layer(1, 2, key=2)]
    catalog.enter({}, {number_of(catalog, a_pack(1)): dropped})
    assert list(catalog.packs().values()) == [a_pack(2)]
    assert [block for block, _ in catalog.blocks()] == [an_id(3)]


def test_other_forms_of_a_dropped_block_stay(catalog: Catalog) -> None:
    enter(catalog, a_pack(1), layer(0, 2), layer(1, 2))
    enter(catalog, a_pack(2), header(1))
    catalog.enter({}, {number_of(catalog, a_pack(1)): [layer(0, 2), layer(1, 2)]})
    assert [form.encoding for form in catalog.forms(an_id(1))] == [Encoding.RAW]


def test_a_pack_takes_the_place_of_another_at_once(catalog: Catalog) -> None:
    enter(catalog, a_pack(1), header(1), header(2))
    catalog.enter(
        {a_pack(2): [(header(2), 700)]}, {number_of(catalog, a_pack(1)): [header(1), header(2)]}
    )
    assert catalog.forms(an_id(1)) == []
    (form,) = catalog.forms(an_id(2))
    assert catalog.pack(form.places[0].pack) == a_pack(2)
    assert form.places[0].offset == 700


@pytest.mark.parametrize("kind", [Kind.OBJECT, Kind.STATISTICS])
def test_objects_and_statistics_of_a_dropped_pack_are_forgotten(
    kind: Kind, catalog: Catalog
) -> None:
    dropped = header(1, kind, base=an_id(9))
    enter(catalog, a_pack(1), dropped)
    catalog.enter({}, {number_of(catalog, a_pack(1)): [dropped]})
    assert catalog.counts() == NOTHING


@pytest.mark.parametrize("kind", [Kind.OBJECT, Kind.STATISTICS])
def test_what_a_new_pack_holds_of_a_dropped_one_stays(kind: Kind, catalog: Catalog) -> None:
    kept, left = header(1, kind, base=an_id(9)), header(2, kind, base=an_id(9))
    enter(catalog, a_pack(1), kept, left)
    old = number_of(catalog, a_pack(1))
    catalog.enter({a_pack(2): [(kept, 500)]}, {old: [kept, left]})
    new = number_of(catalog, a_pack(2))
    if kind is Kind.OBJECT:
        assert [(key, place.pack) for key, place in catalog.objects()] == [(an_id(1), new)]
    else:
        found = [(key, place.pack) for key, _, place in catalog.statistics_places()]
        assert found == [(an_id(1), new)]


def test_the_number_of_a_dropped_pack_is_not_used_again(catalog: Catalog) -> None:
    enter(catalog, a_pack(1), header(1))
    old = number_of(catalog, a_pack(1))
    catalog.enter({}, {old: [header(1)]})
    assert catalog.counts() == NOTHING
    enter(catalog, a_pack(2), header(2))
    assert number_of(catalog, a_pack(2)) != old


# -- prefixes -------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    st.sets(st.binary(min_size=32, max_size=32), max_size=12),
    st.binary(min_size=1, max_size=3),
    st.booleans(),
)
def test_objects_are_found_by_the_beginning_of_their_ids(
    tmp_path_factory: pytest.TempPathFactory, ids: set[bytes], prefix: bytes, known: bool
) -> None:
    if known and ids:
        prefix = min(ids)[: len(prefix)]
    with closing(Catalog(tmp_path_factory.mktemp("catalog") / "catalog")) as catalog:
        enter(catalog, a_pack(1), *(replace(header(0, Kind.OBJECT), key=key) for key in ids))
        found = catalog.objects_with_prefix(prefix.ljust(32, b"\0"), prefix.ljust(32, b"\xff"))
        assert found == sorted(key for key in ids if key.startswith(prefix))


def test_both_ends_of_a_range_of_ids_are_included(catalog: Catalog) -> None:
    enter(catalog, a_pack(1), *(header(key, Kind.OBJECT) for key in range(2, 9)))
    assert catalog.objects_with_prefix(an_id(3), an_id(5)) == [an_id(key) for key in (3, 4, 5)]
    assert catalog.objects_with_prefix(an_id(9), an_id(20)) == []


# -- opening --------------------------------------------------------------------------------------


def test_what_was_entered_is_there_after_reopening(tmp_path: Path) -> None:
    with closing(Catalog(tmp_path / "catalog")) as catalog:
        enter(catalog, a_pack(1), header(1), header(2, Kind.OBJECT))
        before = contents(catalog)
    for read_only in (False, True):
        with closing(Catalog(tmp_path / "catalog", read_only=read_only)) as catalog:
            assert contents(catalog) == before


def test_packs_entered_after_reopening_get_numbers_of_their_own(tmp_path: Path) -> None:
    for number in range(1, 4):
        with closing(Catalog(tmp_path / "catalog")) as catalog:
            enter(catalog, a_pack(number), header(number))
            packs = catalog.packs()
    assert sorted(pack.name for pack in packs.values()) == [a_pack(n).name for n in (1, 2, 3)]


def test_entering_does_not_wait_for_readers(catalog: Catalog) -> None:
    enter(catalog, a_pack(1), header(1), header(2))
    blocks = catalog.blocks()
    assert next(blocks)[0] == an_id(1)
    enter(catalog, a_pack(2), header(3))
    assert [block for block, _ in blocks] == [an_id(2)]
    assert [block for block, _ in catalog.blocks()] == [an_id(key) for key in (1, 2, 3)]


def test_reading_only_needs_a_catalog(tmp_path: Path) -> None:
    with pytest.raises(UnusableRepository, match="catalog"):
        Catalog(tmp_path / "catalog", read_only=True)


@pytest.mark.parametrize("data", [b"x" * 8192, b"\0" * 8192, b"short"], ids=len)
def test_a_file_that_is_no_catalog_is_told_as_such(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "catalog").mkdir()
    (tmp_path / "catalog" / "data.mdb").write_bytes(data)
    with pytest.raises(UnusableRepository) as caught:
        Catalog(tmp_path / "catalog")
    assert "--rebuild-catalog" in caught.value.hint


@pytest.mark.parametrize("share", [0.2, 0.9])
def test_a_catalog_cut_short_is_refused_and_not_mapped(share: float, tmp_path: Path) -> None:
    with closing(Catalog(tmp_path / "catalog")) as catalog:
        enter(catalog, a_pack(1), *(header(key) for key in range(2000)))
    file = tmp_path / "catalog" / "data.mdb"
    os.truncate(file, int(len(file.read_bytes().rstrip(b"\0")) * share))
    with pytest.raises(UnusableRepository) as caught, closing(Catalog(tmp_path / "catalog")) as cut:
        list(cut.blocks())
    assert "--rebuild-catalog" in caught.value.hint


def test_a_place_that_is_no_directory_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "catalog").touch()
    with pytest.raises(UnusableRepository):
        Catalog(tmp_path / "catalog")


def test_a_catalog_is_not_used_across_a_fork(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(RuntimeError, match="fork"):
        catalog.object(an_id(1))
    with pytest.raises(RuntimeError, match="fork"):
        enter(catalog, a_pack(1), header(1))


def test_a_catalog_that_was_half_made_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "catalog").mkdir()
    (tmp_path / "catalog" / "data.mdb.new").write_bytes(b"half")
    with closing(Catalog(tmp_path / "catalog")) as catalog:
        assert catalog.counts() == NOTHING
    assert {path.name for path in (tmp_path / "catalog").iterdir()} == {"data.mdb", "lock.mdb"}


# -- damage ---------------------------------------------------------------------------------------


def small_catalog(tmp_path: Path) -> tuple[Path, bytes]:
    with closing(Catalog(tmp_path / "catalog")) as catalog:
        enter(catalog, a_pack(1), *(header(key, Kind.OBJECT) for key in range(1, 9)))
        enter(catalog, a_pack(2), *(layer(n, 3, key=20) for n in range(3)))
        assert catalog.damage() is None
    file = tmp_path / "catalog" / "data.mdb"
    return file, file.read_bytes()


def test_a_value_that_is_not_what_was_put_is_told_as_such(tmp_path: Path) -> None:
    file, data = small_catalog(tmp_path)
    at = data.rindex(an_id(3)) + 32 + 4
    file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with closing(Catalog(tmp_path / "catalog")) as catalog:
        assert catalog.object(an_id(2)) is not None
        with pytest.raises(DamagedCatalog, match=r"catalog .* is damaged") as caught:
            catalog.object(an_id(3))
    assert "--rebuild-catalog" in caught.value.hint


def test_a_value_that_stands_under_another_key_is_told_as_such(tmp_path: Path) -> None:
    """Each is sound by itself: what one object's entry says of another must not be believed."""
    file, data = small_catalog(tmp_path)
    one, two = (data.rindex(an_id(key)) + 32 for key in (3, 4))
    length = 40
    file.write_bytes(data[:one] + data[two : two + length] + data[one + length :])
    with closing(Catalog(tmp_path / "catalog")) as catalog:
        assert catalog.object(an_id(4)) is not None
        with pytest.raises(DamagedCatalog):
            catalog.object(an_id(3))


def test_a_length_beyond_the_file_is_not_followed(tmp_path: Path) -> None:
    file, data = small_catalog(tmp_path)
    at = (
        data.rindex(an_id(3)) - 8
    )  # the node: two halves of the value's length, flags, key's length
    file.write_bytes(data[:at] + b"\xff\xff\xff\x7f" + data[at + 4 :])
    with (
        closing(Catalog(tmp_path / "catalog")) as catalog,
        pytest.raises((DamagedCatalog, UnusableRepository)),
    ):
        catalog.object(an_id(3))


def test_the_file_is_longer_than_what_is_in_it_and_takes_no_more_on_disk(tmp_path: Path) -> None:
    """So that a damaged length or place in its last page does not lead out of it."""
    file, data = small_catalog(tmp_path)
    contents = len(data.rstrip(b"\0"))
    assert len(data) - contents > 500_000
    assert file.stat().st_blocks * 512 < contents + 16_384


def test_a_file_that_says_it_is_huge_is_refused(tmp_path: Path) -> None:
    file, data = small_catalog(tmp_path)
    for page in range(2):
        at = 4096 * page + 16 + 24 + 96  # the number of the last page
        data = data[:at] + (1 << 27).to_bytes(8, "little") + data[at + 8 :]
    file.write_bytes(data)
    with pytest.raises(DamagedCatalog, match="says that it is"):
        Catalog(tmp_path / "catalog")
    assert file.stat().st_size == len(data)


def test_a_catalog_of_before_checksums_is_read_and_written_as_it_is(tmp_path: Path) -> None:
    with closing(Catalog(tmp_path / "catalog")) as catalog, catalog._begin(write=True) as txn:
        txn.delete(b"sealed", db=catalog._meta)
        catalog._sealed = False
        catalog._enter_pack(txn, a_pack(1))
    with closing(Catalog(tmp_path / "catalog")) as catalog:
        assert not catalog.is_sealed
        enter(catalog, a_pack(2), header(1, Kind.OBJECT))
    with closing(Catalog(tmp_path / "catalog")) as catalog:
        assert [pack.name for pack in catalog.packs().values()] == [a_pack(n).name for n in (1, 2)]
        assert catalog.object(an_id(1)) == Place(2, 100, 7, 7, check=header(1).checksum[:8])


# -- making it again ------------------------------------------------------------------------------


def fill(store: Store) -> None:
    """Several commands' worth of blocks, raw and delta, objects and statistics."""
    base = some_bytes(0, 20_000)
    for number in range(1, 4):
        moved = bytearray(base)
        for place in random.Random(number).sample(range(0, 20_000, 2), 50):
            moved[place] ^= 1
        with store.transaction() as transaction:
            put(store, transaction, base)
            block = put(store, transaction, bytes(moved), base=base)
            put(store, transaction, some_bytes(number, 3000), "U8")
            tensor = transaction.write_tensor(Tensor("BF16", (10_000,), block))
            transaction.write_statistics(tensor, an_id(number), some_bytes(number, 300))
            transaction.write_commit(commit(f"commit {number}"))
            transaction.publish()


@pytest.mark.parametrize("backwards", [False, True])
def test_packs_alone_are_enough_to_make_the_catalog_again(
    backwards: bool, store: Store, tmp_path: Path
) -> None:
    fill(store)
    before = contents(store.catalog)
    assert store.catalog.counts()["objects"] == 6
    paths = sorted(store.location.packs.glob("*.pack"), reverse=backwards)
    with closing(Catalog(tmp_path / "again")) as again:
        again.enter({PackFile(path.stem, path.stat().st_size): scan(path) for path in paths})
        assert contents(again) == before


def test_packs_may_be_entered_one_at_a_time_and_twice(store: Store, tmp_path: Path) -> None:
    fill(store)
    with closing(Catalog(tmp_path / "again")) as again:
        for path in [*store.location.packs.glob("*.pack")] * 2:
            again.enter({PackFile(path.stem, path.stat().st_size): scan(path)})
        assert contents(again) == contents(store.catalog)


def test_a_store_reads_on_from_a_catalog_made_again(store: Store, location: Location) -> None:
    fill(store)
    blocks = {block: store.read_block(block) for block, _ in store.catalog.blocks()}  # type: ignore[arg-type]
    tensors = [key for key, _ in store.catalog.objects()]
    store.close()
    for file in location.catalog.iterdir():
        file.unlink()
    with closing(Store(location)) as again:
        paths = location.packs.glob("*.pack")
        again.catalog.enter({PackFile(p.stem, p.stat().st_size): scan(p) for p in paths})
        assert {block: again.read_block(block) for block in blocks} == blocks
        assert [again.object_bytes(key) for key in tensors]
        assert {base for _, base in again.catalog.all_statistics()} == {an_id(n) for n in (1, 2, 3)}
        for tensor, base in again.catalog.all_statistics():
            assert again.read_statistics(TensorId(tensor), base)


def test_one_catalog_can_be_open_twice_in_a_process(tmp_path: Path) -> None:
    first = Catalog(tmp_path / "catalog")
    second = Catalog(tmp_path / "catalog")
    first.close()
    assert second.counts()["packs"] == 0
    second.close()
    third = Catalog(tmp_path / "catalog")
    assert third.counts()["packs"] == 0
    third.close()
