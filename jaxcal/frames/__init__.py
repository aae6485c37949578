"""Tables of users, arrays or data frames, and their conversion in a fit: to numbers, scales and labels of groups."""

import pkgutil

import lazy_loader

# A module is loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, [module.name for module in pkgutil.iter_modules(__path__)])
