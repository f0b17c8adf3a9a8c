# SPDX-License-Identifier: Apache-2.0
"""Which rank owns what, element by element: an oracle for small worlds that shares no code with the library."""


class Grid:
    """Of a spec as colo-plan takes it: "tp=2,dp=4@8", the first dim fastest."""

    def __init__(self, spec):
        self.spec = spec
        dims, _, offset = spec.partition('@')
        self.extents = {name: int(extent) for name, extent in (dim.split('=') for dim in dims.split(','))}
        self.offset = self.end = int(offset or 0)
        size = 1
        for extent in self.extents.values():
            size *= extent
        self.end += size

    def coords(self, rank):
        """By repeated division; {} for a rank outside"""
        at = {}
        if self.offset <= rank < self.end:
            rank -= self.offset
            for name, extent in self.extents.items():
                rank, at[name] = divmod(rank, extent)
        return at

    def owned(self, rank, is_src, samples, rows, all_rows=False, sp=False, offset=0, positions=None):
        """The (sample, row) of @samples x @rows that a rank has. The last pp stage gives, the first one takes; rows
        begin at @offset of @positions, which are cut over cp, and over tp, too, with @sp."""
        at, of = self.coords(rank), lambda name: self.extents.get(name, 1)
        if not at or at.get('pp', 0) != (of('pp') - 1 if is_src else 0):
            return set()
        dp, cp, tp = at.get('dp', 0), at.get('cp', 0), at.get('tp', 0)
        mine = range(dp * samples // of('dp'), (dp + 1) * samples // of('dp'))
        positions = positions or rows
        chunk = positions // (2 * of('cp'))
        local = [p for p in range(positions) if of('cp') == 1 or p // chunk in (cp, 2 * of('cp') - 1 - cp)]
        if sp:
            local = local[tp * len(local) // of('tp'):(tp + 1) * len(local) // of('tp')]
        part = range(rows) if all_rows else [p - offset for p in local if offset <= p < offset + rows]
        return {(sample, row) for sample in mine for row in part}
