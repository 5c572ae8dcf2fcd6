"""All checks, in the order in which a question needs what they look at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from kvtool.core.cache.store import Store
from kvtool.core.checkpoint.files import PACKAGED, ModelFiles
from kvtool.core.checkpoint.hub import resolve
from kvtool.core.common.files import cache_dir
from kvtool.core.errors import KvtoolError, ModelError
from kvtool.core.model.options import DEFAULT_MODEL, ModelOptions
from kvtool.core.remote.mirror import local_place
from kvtool.core.session.identity import StoreIdentity, model_files, store_identity
from kvtool.lab.doctor.finding import Finding, failing
from kvtool.lab.doctor.installation import check_extras, check_kvtool, check_libraries
from kvtool.lab.doctor.machine import check_attention, check_cpu, check_device, check_dtype, check_memory
from kvtool.lab.doctor.places import check_disk, check_gate, check_store, check_tier
from kvtool.lab.doctor.plugins import check_plugins


def checkup(place: Path | str, wanted: ModelOptions, timeout: float, doing: Callable[[str], None]) -> list[Finding]:
    """Look at everything. Nothing is changed or downloaded, but a GGUF file's model is converted as at its first use.

    Parameters
    ----------
    place : the store's folder, or the URL of a shared store.
    timeout : seconds to wait for that.
    doing : told what is looked at.
    """
    doing("looking at the libraries")
    found = [*check_kvtool(), *(libraries := check_libraries())]
    if any(finding.state == "failed" for finding in libraries):
        return found  # most other checks would only fail for want of these
    found += [*check_extras(), *check_plugins(), *check_cpu(), *check_memory(), *check_device(wanted)]
    doing("writing to the disk and reading back")
    here = place if isinstance(place, Path) else local_place(place)
    if not isinstance(place, Path):
        found += check_tier(place, timeout)
    if here is place or here.exists():  # a store in front is made by the first question
        found += [*check_disk(here, "disk of the store"), *check_store(here)]
    identity = _identity(here)
    found += check_disk(cache_dir(), "disk of the cache")
    doing("looking for the model")
    if here is place or identity is not None or wanted.model is not None:  # else the shared store tells at a question
        found += _check_model(identity, wanted)
    if identity is not None:
        found += check_gate(here, identity)
    return found


def _identity(folder: Path) -> StoreIdentity | None:
    """Return the store's identity; None if it cannot be read, which other findings report."""
    with suppress(KvtoolError, OSError), Store.open(folder) as store:
        return store_identity(store)
    return None


@failing("model")
def _check_model(identity: StoreIdentity | None, wanted: ModelOptions) -> Iterator[Finding]:
    """Look for the model that is asked for, the store's own, or that of a new store; whether its kind is supported, and
    its number format."""
    from kvtool.core.checkpoint.load import supported_config

    try:
        files = _files(identity, replace(wanted, offline=True))
    except ModelError:
        if identity is not None or wanted.model is not None:
            raise
        text = f"{DEFAULT_MODEL}, which a new store takes, is not on this machine"
        hint = f"the first `kvtool ingest` downloads it; --model {PACKAGED} needs no model hub"
        yield Finding("model", "warning", text, hint)
        return
    supported_config(files)
    yield Finding("model", "ok", f"{files.ref} ({files.kind}) at {files.folder}")
    yield from [*check_dtype(wanted, files), *check_attention(wanted, files)]


def _files(identity: StoreIdentity | None, wanted: ModelOptions) -> ModelFiles:
    if identity is not None:
        return model_files(identity, wanted)  # offline, so that nothing is fetched whoever named it
    return resolve(wanted.model or DEFAULT_MODEL, offline=True)
