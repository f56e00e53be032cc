"""An installed package, as Python sees one: a module and the metadata of a distribution, in a folder on sys.path."""

from pathlib import Path


def install(folder: Path, name: str, version: str, code: str = "", entry_points: str = "") -> None:
    """Write a distribution into a folder: `name.py` with some code, and what its metadata says."""
    folder.joinpath(f"{name}.py").write_text(code)
    metadata = folder / f"{name}-{version}.dist-info"
    metadata.mkdir()
    metadata.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )
    metadata.joinpath("entry_points.txt").write_text(entry_points)


def install_transformers(folder: Path, version: str) -> str:
    """Write another transformers than the one that is installed, with an empty Trainer.

    Gives what goes on the path.
    """
    site = folder / "site"
    (site / "transformers").mkdir(parents=True)
    install(site, "transformers", version)
    (site / "transformers.py").rename(site / "transformers" / "__init__.py")
    (site / "transformers" / "trainer.py").write_text(
        "class Trainer:\n    def add_callback(self): ...\n"
    )
    return str(site)
