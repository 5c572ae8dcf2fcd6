"""Every error carries the exit code that `kvtool help troubleshooting` promises."""

from kvtool.core import errors


def test_codes_are_the_contract() -> None:
    assert {
        cls.__name__: cls.exit_code
        for cls in vars(errors).values()
        if isinstance(cls, type) and issubclass(cls, errors.KvtoolError)
    } == {
        "KvtoolError": 1,
        "NothingFoundError": 1,
        "NoDocumentsError": 1,
        "BudgetError": 14,
        "UsageError": 2,
        "ContextFullError": 2,
        "StoreNotFoundError": 10,
        "StoreLockedError": 11,
        "StoreFormatError": 12,
        "ModelError": 12,
        "GateError": 12,
        "UntrustedError": 12,
        "DamagedError": 13,
        "RemoteError": 1,
        "NoSpaceError": 14,
    }
