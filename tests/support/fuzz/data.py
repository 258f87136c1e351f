"""Random batches for every fit: their sizes, lengths and parts."""


class DrawnData:
    """The batches of every fit.

    Args:
        draw: `random.Random`.
        model: `Model`.
        backend: name of the backend.
        which: how batches make updates.
    """

    def __init__(self, draw, model, backend, which):
        self.draw = draw
        sizes = draw.sample([1, 2, 3, 4], 2)
        if which in ("slices", "batch"):
            sizes = draw.sample([3, 4, 5, 7], 2)
        if backend == "jax" and (model.is_padded or draw.random() < 0.7):
            sizes = sizes[:1]  # Every shape is compiled.
        self.varies = model.varies_in_length
        count = draw.choice([1, 1, 1, 2, 2, 3]) if which != "sizes" else 1
        self.fits = [self._fit(sizes, which) for _ in range(count)]
        self.lengths = [[4] * len(sizes) for _, sizes, _ in self.fits]
        self.extras = [[False] * len(sizes) for _, sizes, _ in self.fits]
        self.spoilt = [set() for _ in self.fits]
        self.test_length = draw.choice([4, 2, 3]) if self.varies else 4
        self.test_size = draw.choice([5, 2])

    def _fit(self, sizes, which):
        draw = self.draw
        is_even = draw.random() < 0.5
        size = draw.choice(sizes)
        most = 3 if which in ("slices", "batch") else 6
        count = draw.randint(1, most)
        chosen = [size if is_even else draw.choice(sizes) for _ in range(count)]
        epochs = 1 if which == "batch" else draw.choice([1, 1, 2])
        return epochs, chosen, is_even

    @property
    def fewest(self):
        """How many batches the shortest fit has."""
        return min(len(sizes) for _, sizes, _ in self.fits)

    @property
    def are_even(self):
        """Whether a fit's batches could be cut out of arrays."""
        return self.have_same_parts and all(
            is_even and len(set(lengths)) == 1
            for (_, _, is_even), lengths in zip(
                self.fits, self.lengths, strict=True
            )
        )

    @property
    def have_same_parts(self):
        """Whether no fit has batches that have more than others."""
        return all(len(set(extras)) == 1 for extras in self.extras)

    @property
    def has_one_epoch(self):
        """Whether nothing is read twice."""
        return all(epochs == 1 for epochs, _, _ in self.fits)

    def differ_within(self, steps):
        """Say whether some update of so many batches has several lengths."""
        return any(
            len(set(lengths[first : first + steps])) > 1
            for lengths in self.lengths
            for first in range(0, len(lengths), steps)
        )

    def draw_lengths(self, steps):
        """Draw a length for every update of so many batches."""
        if not self.varies or self.draw.random() < 0.4:
            return
        choices = self.draw.sample([2, 3, 4], 2)
        for lengths in self.lengths:
            for index in range(len(lengths)):
                if index % steps == 0:
                    length = self.draw.choice(choices)
                lengths[index] = length

    def draw_extras(self, steps):
        """Draw for every update of so many batches whether it has more."""
        for extras in self.extras:
            for index in range(len(extras)):
                if index % steps == 0:
                    has_more = self.draw.random() < 0.5
                extras[index] = has_more

    def spoil(self, steps):
        """Have an update of a fit be not finite, where it has others."""
        for spoilt, lengths in zip(self.spoilt, self.lengths, strict=True):
            if len(lengths) >= 2 * steps:
                spoilt.add(self.draw.randrange(len(lengths) - steps))

    @property
    def rows(self):
        """The text of all fits."""
        rows = []
        for (epochs, sizes, _), lengths, extras, spoilt in zip(
            self.fits, self.lengths, self.extras, self.spoilt, strict=True
        ):
            batches = [
                f"make_batch(rng, {size}, {length}{', True' * extra})"
                for size, length, extra in zip(
                    sizes, lengths, extras, strict=True
                )
            ]
            for index in spoilt:
                batches[index] = f"spoil({batches[index]})"
            rows.append(f"    ({epochs}, [{', '.join(batches)}]),\n")
        return "".join(rows)
