"""Tables as users give them, arrays or data frames, and what a fit makes of them: numbers, scales, labels of groups."""
