"""Pure functions of arrays, which do not depend on the rest of the library."""

import lazy_loader

# A name is loaded when it is first used: `__init__.pyi` has them.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
