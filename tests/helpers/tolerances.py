"""Every tolerance of the tests, with its reason."""

FLOAT64_ENUMERATION = 1e-10
"""Relative. Two float64 computations of one number: some thousand roundings of 1e-16, times
slack."""

FLOAT32_PACKED_AGAINST_SEPARATE = 1e-4
"""Relative to the largest entry. float32 rounds at 6e-8; matrix shapes change the order of sums,
and three layers with peaked attention enlarge that some hundred times."""

FLOAT32_STEP_INVARIANCE = 1e-4
"""Relative to the largest entry: the same gradient summed over packs of other sizes."""

FLOAT32_RECOMPUTED = 1e-5
"""Relative to the largest entry: the same layers on the same numbers, in matrices of fewer rows."""
