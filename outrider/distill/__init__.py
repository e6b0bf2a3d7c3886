"""`outrider distill`: from prompts to a draft of a target. Needs torch; nothing else in the package imports it."""

import outrider.lm  # noqa: F401  (before torch: it sets how idle threads wait)
