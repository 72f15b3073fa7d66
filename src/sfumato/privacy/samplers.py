"""Exact integer samplers: discrete Gaussian, discrete Laplace and Skellam, from 64-bit words.

One method serves all three. A value is drawn by inversion: the number of cumulative probabilities
that a uniform real U does not reach. U is never rounded: its first word decides unless it ties
with the first word of a cumulative probability (about one draw in 2**55 at a scale of ten), and
then more words of U are drawn and compared with the probabilities at a higher precision.
So the samples follow the stated distribution exactly, tails included; no float is involved.

Claim: each sample has the stated probability mass function, given uniform independent words.
Proof: docs/proofs/samplers.md.
Assumes: the words of `rng` are uniform. Nothing is constant-time: the time that a device takes may
    reveal something about its noise.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Protocol

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from sfumato.arrays import F64, I64, U8, U64, Bool
from sfumato.errors import SpecError
from sfumato.kernels import local
from sfumato.privacy.noise_kinds import NOISES, Noise, exp_below

WORD_BITS = 64
LARGEST_SCALE = {name: kind.largest_scale for name, kind in NOISES.items()}
PROBABILITY_BITS = 256  # precision of a Bernoulli probability
_FINE_BITS = 320  # precision of the exponentials behind it
_MANY_WORDS = 1 << 12  # from here on, AES is faster than the system's generator
_PIECE_WORDS = 1 << 13
_ZEROS = memoryview(bytes(1 << 21))
LEAST_SCALE = 1e-6  # below, the noise is zero except with negligible probability


class Rng(Protocol):
    """A source of random words. Randomness is always an argument."""

    def words(self, count: int) -> U64:
        """`count` independent uniform 64-bit words."""
        ...


class SystemRng:
    """The operating system's cryptographic generator, used by real devices and releases.

    Many words at once come from AES-128 in counter mode under a fresh key from the system for each
    call: ten times as fast, and as good as the key.
    """

    def words(self, count: int) -> U64:
        generate = os.urandom if count < _MANY_WORDS else _key_stream
        return np.frombuffer(generate(8 * count), dtype=np.uint64)

    def __repr__(self) -> str:
        return "SystemRng()"


class SeededRng:
    """Words that follow from a seed: for simulations and tests, never for a real release."""

    def __init__(self, *seed: int) -> None:
        for part in seed:
            if not isinstance(part, int | np.integer) or part < 0:
                raise SpecError(f"a seed must be a whole number of at least 0; got {part!r}")
        self._seed = seed
        self._generator = np.random.Philox(np.random.SeedSequence(seed))

    def words(self, count: int) -> U64:
        return np.asarray(self._generator.random_raw(count), dtype=np.uint64)

    def stream(self, label: str) -> SeededRng:
        """Words of the same seed for one purpose, independent of earlier draws."""
        name = hashlib.sha256(label.encode()).digest()[:8]
        return SeededRng(*self._seed, int.from_bytes(name, "little"))

    def __repr__(self) -> str:
        return "SeededRng(…)"  # its state is the noise


class SecretRng:
    """Words that follow from a secret, a purpose and the data that they are added to.

    A campaign whose answers are absorbed again after a crash must draw the same noise. The same
    noise on other data could be removed by subtracting two releases, for example when a copy of a
    store is restored and continues. So `bound` must name the data before anything is drawn.

    Claim: words for different purposes or data are independent, to anyone without the secret, if
        HMAC-SHA-256 and SHAKE256 are pseudorandom and SHA-256 has no collisions.
    """

    def __init__(self, secret: bytes) -> None:
        self._secret, self._calls = secret, 0
        self._key: bytes | None = None

    def bound(self, purpose: str, *data: bytes) -> SecretRng:
        """Words for one purpose over this data."""
        parts = b"".join(hashlib.sha256(part).digest() for part in (purpose.encode(), *data))
        child = SecretRng(self._secret)
        child._key = hmac.digest(self._secret, b"sfumato/2/campaign/" + parts, "sha256")
        return child

    def words(self, count: int) -> U64:
        if self._key is None:
            raise SpecError(
                "the words of a secret must be bound to the data that they are added to",
                hint="call `bound` first",
            )
        self._calls += 1
        stream = hashlib.shake_256(self._key + self._calls.to_bytes(8, "little")).digest(8 * count)
        return np.frombuffer(stream, dtype="<u8").astype(np.uint64)

    def __repr__(self) -> str:
        return "SecretRng(…)"  # its state is the noise


def bound(rng: Rng, purpose: str, *data: bytes) -> Rng:
    """Randomness for one purpose over this data; words of a secret repeat only for the same purpose
    and data."""
    return rng.bound(purpose, *data) if isinstance(rng, SecretRng) else rng


def stream(rng: Rng, label: str) -> Rng:
    """Randomness for one purpose; with a seed it depends on the purpose and not on earlier draws.
    The same purpose gives the same words, so each purpose is used once."""
    return rng.stream(label) if isinstance(rng, SeededRng) else rng


def _key_stream(size: int) -> bytes:
    secret = os.urandom(32)
    cipher = Cipher(algorithms.AES(secret[:16]), modes.CTR(secret[16:]))
    return cipher.encryptor().update(_ZEROS[:size] if size <= len(_ZEROS) else bytes(size))


def below(bound: int, count: int, rng: Rng) -> I64:
    """`count` whole numbers, uniform on 0 .. bound − 1, exactly: words that would favour some
    numbers are drawn again."""
    if bound < 1:
        raise SpecError(f"bound must be at least 1; got {bound}")
    words = rng.words(count)
    if bound & (bound - 1) == 0:
        return (words & np.uint64(bound - 1)).view(np.int64)
    limit = np.uint64((1 << WORD_BITS) - (1 << WORD_BITS) % bound)
    while (again := np.flatnonzero(words >= limit)).size:
        words = words.copy()
        words[again] = rng.words(again.size)
    return (words % np.uint64(bound)).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Bernoulli:
    """Bits that are 1 with a probability of `digits`/2**256, exactly.

    A probability such as 1/(1 + e^epsilon) has infinitely many binary digits; here it has 256,
    rounded to the side that adds privacy, so that a claim of epsilon holds exactly.
    """

    numerator: int  # over 2**256

    @classmethod
    @lru_cache(maxsize=64)
    def flip(cls, epsilon: float) -> Bernoulli:
        """1/(1 + e^epsilon), rounded up: a lie is never rarer than claimed."""
        one = 1 << _FINE_BITS
        return cls(-(-(one << PROBABILITY_BITS) // (one + _odds_below(epsilon))))

    @classmethod
    @lru_cache(maxsize=64)
    def truth(cls, epsilon: float, others: int) -> Bernoulli:
        """e^epsilon/(e^epsilon + others), rounded down: the truth is never too likely."""
        odds = _odds_below(epsilon)
        return cls((odds << PROBABILITY_BITS) // (odds + (others << _FINE_BITS)))

    @property
    def probability(self) -> float:
        return float(Fraction(self.numerator, 1 << PROBABILITY_BITS))

    def words(self, count: int, rng: Rng) -> U64:
        """`count` words of 64 such bits."""
        # Leading zeros cost one word each: a lane is 1 only if all of them are. The other digits
        # are for the few lanes that are left, which are packed into words of their own.
        digits = self._digits()
        zeros = int(np.argmax(digits)) if digits.any() else digits.size
        out = np.empty(count, dtype=np.uint64)
        for start in range(0, count, _PIECE_WORDS):  # a piece fits in the cache
            part = out[start : start + _PIECE_WORDS]
            leading = rng.words(zeros * part.size).reshape(zeros, part.size)
            np.bitwise_and.reduce(leading, axis=0, out=part)  # all ones if there are none
            left = int(np.bitwise_count(part).sum(dtype=np.uint32))
            local.deposit(self._biased(digits[zeros:], -(-left // WORD_BITS), rng), part)
        return out

    @staticmethod
    def _biased(digits: U8, count: int, rng: Rng) -> U64:
        out = np.empty(count, dtype=np.uint64)
        words = rng.words(count * 19 // 2 + 64)
        done, used = local.biased_words(digits, words, out)
        while done < count:
            # A block that ran out of words starts again with the same ones: new ones would favour
            # lanes that are decided early.
            words = np.concatenate([words[used:], rng.words((count - done) * 19 // 2 + 64)])
            filled, used = local.biased_words(digits, words, out[done:])
            done += filled
        return out

    def bits(self, count: int, rng: Rng) -> Bool:
        words = self.words(-(-count // WORD_BITS), rng)
        bits = np.unpackbits(words.astype("<u8").view(np.uint8), bitorder="little")
        return bits[:count].astype(np.bool_)

    def _digits(self) -> U8:
        data = self.numerator.to_bytes(PROBABILITY_BITS // 8, "big")
        return np.unpackbits(np.frombuffer(data, dtype=np.uint8))


def _odds_below(epsilon: float) -> int:
    """A little less than e^epsilon × 2**_FINE_BITS: the decimal behind it may be rounded up."""
    return exp_below(Fraction(epsilon), _FINE_BITS) - 1


def discrete_gaussian(stddev: float, size: int | tuple[int, ...], rng: Rng) -> I64:
    """Integers x with probability ∝ exp(−x²/(2·stddev²))  (Canonne, Kamath, Steinke 2020).

    >>> discrete_gaussian(10.0, 5, SeededRng(1)).dtype
    dtype('int64')
    """
    return sampler_of("gaussian", float(stddev)).draw(size, rng)


def discrete_laplace(scale: float, size: int | tuple[int, ...], rng: Rng) -> I64:
    """Integers x with probability ∝ exp(−|x|/scale)."""
    return sampler_of("laplace", float(scale)).draw(size, rng)


def skellam(stddev: float, size: int | tuple[int, ...], rng: Rng) -> I64:
    """The difference of two Poisson variables of mean stddev²/2 each; adds up over devices."""
    return sampler_of("skellam", float(stddev)).draw(size, rng)


@lru_cache(maxsize=64)
def log_mass(kind: Noise, scale: float) -> tuple[int, F64]:
    """The distribution as (first value, log probabilities), to float accuracy, for accounting."""
    half = NOISES[kind].weights(Fraction(scale), 2 * WORD_BITS)
    total = 2 * sum(half) - half[0]
    logs = [math.log(weight) - math.log(total) for weight in half if weight]
    return 1 - len(logs), np.array(logs[:0:-1] + logs)


@dataclass(frozen=True, slots=True)
class Inversion:
    """Draws from a symmetric distribution on the integers, given its weights to any precision.

    `half_weights(bits)` lists integers proportional to the probabilities of 0, 1, 2, …: each is
    within 2**-bits of its true share of the whole, and so is the sum of those left out.
    `word_bits` is 64; tests make it small, so that ties are frequent.
    """

    half_weights: Callable[[int], list[int]]
    first: int
    cumulative: U64  # first words of the cumulative probabilities, from the value `first` up
    word_bits: int = WORD_BITS

    @classmethod
    def of(cls, half_weights: Callable[[int], list[int]], word_bits: int = WORD_BITS) -> Inversion:
        bits = 2 * WORD_BITS
        first, bounds = _cumulative(half_weights(bits), bits)
        words = [low >> (bits - word_bits) for low, _ in bounds]
        return cls(half_weights, first, np.array(words, dtype=np.uint64), word_bits)

    def draw(self, size: int | tuple[int, ...], rng: Rng) -> I64:
        shape = (size,) if isinstance(size, int) else size
        words = rng.words(math.prod(shape)) >> np.uint64(WORD_BITS - self.word_bits)
        passed = np.searchsorted(self.cumulative, words, side="right")
        values = passed.astype(np.int64) + self.first
        # A tie means that U may lie on either side. The lower bounds are within one of the truth
        # in their last place, so a word just above one counts as a tie, too.
        ties = words - self.cumulative[passed - 1] <= 1
        for index in np.flatnonzero(ties):
            values[index] = self._settle(int(words[index]), rng)
        return values.reshape(shape)

    def _settle(self, prefix: int, rng: Rng) -> int:
        """The value for a U that begins with `prefix`: add words and precision until it is
        certain."""
        bits = self.word_bits
        while True:
            word = int(rng.words(1)[0]) >> (WORD_BITS - self.word_bits)
            prefix, bits = prefix << self.word_bits | word, bits + self.word_bits
            precision = bits + 2 * WORD_BITS
            first, bounds = _cumulative(self.half_weights(precision), precision)
            low, high = prefix << 2 * WORD_BITS, (prefix + 1) << 2 * WORD_BITS  # low <= U < high
            certain = sum(above <= low for _, above in bounds)
            possible = sum(below < high for below, _ in bounds)
            if 0 < certain == possible < len(bounds):
                return first + certain


def _cumulative(half: list[int], bits: int) -> tuple[int, list[tuple[int, int]]]:
    """From half the weights: a value, and bounds on cumulative probabilities × 2**bits from it up.

    Each pair is a lower and an upper bound, both inclusive. The first pair is for the values below
    the table, which together have less than one place: without it, a table of few values could not
    decide that a U is above them.
    """
    weights = half[:0:-1] + half
    total = sum(weights)
    slack = len(weights) + 2  # each weight, and the part left out, is off by at most one place
    bounds, running = [(0, slack)], 0
    for weight in weights:
        running += weight
        place = (running << bits) // total
        bounds.append((max(place - slack, 0), min(place + slack, 1 << bits)))
    return -len(half), bounds


@lru_cache(maxsize=64)
def sampler_of(kind: Noise, scale: float) -> Inversion:
    if not LEAST_SCALE <= scale <= LARGEST_SCALE[kind]:
        raise SpecError(
            f"the scale of {kind} noise must be {LEAST_SCALE} to {LARGEST_SCALE[kind]}; got {scale}"
        )
    exact = Fraction(scale)
    return Inversion.of(lambda bits: NOISES[kind].weights(exact, bits))
