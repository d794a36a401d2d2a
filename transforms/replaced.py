"""How a replay puts new dead letters in the place of those that it has consumed. No Beam here.

First the old pair of files gets a further name under `_gristmill/replayed/`, then the new pair takes the final names.
Every act may be repeated after a crash: an old pair that is there already is never taken from the final names again.
"""

from __future__ import annotations

from transforms.elements import JobSpec
from transforms.generations import find_letters, moved_name, renew
from transforms.letters import letters_file
from transforms.names import dead_letter_names
from transforms.store import OutputError, Store


def final_letters(store: Store, spec: JobSpec, shard: int) -> tuple[str, str]:
    """Returns the final names of a planned shard's dead-letter lines and payloads.

    Those of a replay are the names of the pair that it replaces.
    """
    if spec.replay is None:
        return dead_letter_names(spec, shard)
    file = letters_file(store, shard)
    return file.lines, file.payloads


def set_aside(store: Store, spec: JobSpec, shard: int) -> None:
    """Gives the pair that a replay consumes its name for good; nothing to do outside a replay.

    Raises:
        OutputError: It is gone, or another one.
    """
    if spec.replay is None:
        return
    file = letters_file(store, shard)
    for final, size in ((file.lines, file.lines_size), (file.payloads, file.payloads_size)):
        moved = moved_name(spec.generation, final)
        if size is None or (store.size(moved) == size and renew(store, moved)):
            continue
        if store.size(final) != size:
            raise OutputError(f"{final} is not the file that was replayed; run the same command again")
        store.copy(final, moved)


def delete_replaced(store: Store, spec: JobSpec, shard: int, names: set[str]) -> None:
    """Deletes what a replay has consumed and nothing takes the place of; nothing to do outside a replay.

    Args:
        store: The output directory as the replay sees it.
        spec: The replay.
        shard: Its planned shard.
        names: Final names that the shard has given.
    """
    if spec.replay is None:
        return
    for final in final_letters(store, spec, shard):
        if final not in names and find_letters(store, spec.generation, final) == final:
            store.delete(final)
