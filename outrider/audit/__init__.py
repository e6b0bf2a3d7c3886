"""A recorded stream decided once more, by slow code of its own and the target's weights: `outrider audit`."""
