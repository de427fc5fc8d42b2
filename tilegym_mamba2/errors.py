"""The two errors of the package that are not about arguments."""


class RegistryError(ValueError):
    """A registry file is wrong, or clashes with what is registered; names file, table and key."""


class BackendUnavailable(RuntimeError):
    """A chosen backend cannot run here; says what is missing, what was found and what to install."""
