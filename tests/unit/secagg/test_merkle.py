"""Merkle trees: known roots, every proof of small trees, and that no other leaf fits."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks import SEED
from sfumato.errors import MismatchError
from sfumato.secagg.merkle import HASH_BYTES, Tree, most_proof_bytes, root_from

# The leaves, and the roots of the first one, two, ... of them, that implementations of Certificate
# Transparency (RFC 6962 and 9162) test with.
LEAVES = [
    bytes.fromhex(text)
    for text in (
        "",
        "00",
        "10",
        "2021",
        "3031",
        "40414243",
        "5051525354555657",
        "606162636465666768696a6b6c6d6e6f",
    )
]
ROOTS = [
    "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d",
    "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125",
    "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77",
    "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7",
    "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4",
    "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef",
    "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c",
    "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328",
]


def leaves(count: int) -> list[bytes]:
    return [place.to_bytes(32, "little") for place in range(count)]


def test_roots_are_those_of_certificate_transparency() -> None:
    assert [Tree(LEAVES[: count + 1]).root.hex() for count in range(8)] == ROOTS


def tree_hash(listing: list[bytes]) -> bytes:
    """MTH as section 2.1.1 of RFC 9162 defines it."""
    if len(listing) == 1:
        return hashlib.sha256(b"\x00" + listing[0]).digest()
    cut = 1 << (len(listing) - 1).bit_length() - 1
    return hashlib.sha256(b"\x01" + tree_hash(listing[:cut]) + tree_hash(listing[cut:])).digest()


def path(place: int, listing: list[bytes]) -> bytes:
    """PATH as section 2.1.3.1 of RFC 9162 defines it."""
    if len(listing) == 1:
        return b""
    cut = 1 << (len(listing) - 1).bit_length() - 1
    if place < cut:
        return path(place, listing[:cut]) + tree_hash(listing[cut:])
    return path(place - cut, listing[cut:]) + tree_hash(listing[:cut])


@pytest.mark.parametrize("count", [*range(1, 40), 63, 64, 65, 100, 127, 128, 129])
def test_trees_of_every_size_are_those_of_the_standard(count: int) -> None:
    """Its roots, and the proof of one leaf: an inclusion proof."""
    listing = leaves(count)
    tree = Tree(listing)
    assert tree.root == tree_hash(listing)
    for place in range(count):
        proof = path(place, listing)
        assert tree.proof([place]) == proof
        assert root_from({place: listing[place]}, proof, count=count) == tree.root


@cache
def most_hashes(places: int, count: int) -> int:
    """The longest proof of this many places, in hashes, over all ways to divide them."""
    if places == count:
        return 0
    if places == 0:
        return 1
    cut = 1 << (count - 1).bit_length() - 1
    return max(
        most_hashes(left, cut) + most_hashes(places - left, count - cut)
        for left in range(max(0, places - count + cut), min(places, cut) + 1)
    )


def test_no_proof_is_longer_than_the_bound_says() -> None:
    """For every number of places in trees of up to 80 leaves; in full trees the bound is met."""
    for count in range(1, 81):
        for places in range(1, count + 1):
            longest, bound = (
                HASH_BYTES * most_hashes(places, count),
                most_proof_bytes(places, count),
            )
            assert longest <= bound
            assert longest == bound or count & (count - 1)


@pytest.mark.parametrize("count", range(1, 11))
def test_every_proof_of_a_small_tree_gives_its_root(count: int) -> None:
    listing = leaves(count)
    tree = Tree(listing)
    longest = dict.fromkeys(range(1, count + 1), 0)
    for size in longest:
        for places in itertools.combinations(range(count), size):
            proof = tree.proof(places)
            entries = {place: listing[place] for place in places}
            assert root_from(entries, proof, count=count) == tree.root
            longest[size] = max(longest[size], len(proof))
    assert all(longest[size] <= most_proof_bytes(size, count) for size in longest)
    if count & (count - 1) == 0:  # in a full tree the bound is attained
        assert all(longest[size] == most_proof_bytes(size, count) for size in longest)


@given(st.integers(2, 300), st.integers(0, 2**32 - 1))
def test_no_other_leaf_place_or_hash_fits(count: int, seed: int) -> None:
    chance = np.random.default_rng([SEED, seed])
    listing = leaves(count)
    tree = Tree(listing)
    places = sorted(chance.permutation(count)[: int(chance.integers(1, count + 1))].tolist())
    entries, proof = {place: listing[place] for place in places}, tree.proof(places)
    assert len(proof) <= most_proof_bytes(len(places), count)
    assert root_from(entries, proof, count=count) == tree.root
    changed_leaf = entries | {places[0]: b"another"}
    assert root_from(changed_leaf, proof, count=count) != tree.root
    if proof:
        changed = bytearray(proof)
        changed[int(chance.integers(len(proof)))] ^= 1 << int(chance.integers(8))
        assert root_from(entries, bytes(changed), count=count) != tree.root
    absent = [place for place in range(count) if place not in entries]
    if absent:
        elsewhere = dict(entries)
        elsewhere[absent[0]] = elsewhere.pop(places[0])
        with contextlib.suppress(MismatchError):  # a longer proof may be needed there
            assert root_from(elsewhere, proof, count=count) != tree.root
    for wrong in (proof + bytes(HASH_BYTES), proof[:-1] if proof else bytes(1)):
        with pytest.raises(MismatchError, match="must have"):
            root_from(entries, wrong, count=count)


def test_places_outside_the_tree_are_refused() -> None:
    for entries in ({}, {3: b""}, {-1: b""}):
        with pytest.raises(MismatchError, match="some of the places 0 to 2"):
            root_from(entries, b"", count=3)


def test_a_node_is_not_a_leaf() -> None:
    """The attack: a leaf that is two hashes, so that a tree of four looks like one of two."""
    listing = leaves(4)
    inner = [Tree(listing[:2]).root, Tree(listing[2:]).root]
    assert Tree([b"".join(inner)]).root != Tree(listing).root
    assert Tree(inner).root != Tree(listing).root
