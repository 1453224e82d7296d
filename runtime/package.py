"""A generated package: a folder with ``manifest.json`` and the sources that it names."""

import hashlib
import json
import re
import shlex
from functools import cached_property
from pathlib import Path

from .errors import PackageError
from .files import read_json
from .manifest import MANIFEST_FORMAT, RANGE_FORMAT, TARGETS, Manifest, TargetManifest, read_manifest
from .prebuilt import Prebuilt, read_prebuilt

_EXPLANATION = ("plan", "spec", "regenerate", "skipped")  # of a manifest: says where it comes from, changes nothing that is computed
_INCLUDE = re.compile(rb'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


class Package:
    """A folder that the generator wrote. Creating one costs nothing; the manifest is read at first use.

    What was read stays as it was read: generating the folder again makes another package of it, which another ``Package`` reads.
    Two packages compare equal when they name the same folder. Raises PackageError at first use where the folder or
    its manifest is missing, or not what this runtime reads.
    """

    def __init__(self, path):
        self.path = Path(path)
        self._texts: dict[str, bytes] = {}  # of the files that were read, by name

    def __repr__(self):
        return f"Package({str(self.path)!r})"

    def __eq__(self, other):
        return isinstance(other, Package) and self.path == other.path

    def __hash__(self):
        return hash(self.path)

    def __reduce__(self):
        return Package, (str(self.path),)

    def __deepcopy__(self, memo):
        return self

    @cached_property
    def _data(self) -> dict:
        """The manifest as it lies in the folder."""
        path = self.path / "manifest.json"
        try:
            data = read_json(path)
        except FileNotFoundError:
            raise PackageError(
                f"{self.path} is not a generated package: it has no manifest.json; generate it with make generate SPEC=..."
            ) from None
        except (OSError, ValueError) as error:
            raise PackageError(f"{path} cannot be read ({error}); generate the package again.") from error
        found = data.get("format") if isinstance(data, dict) else None
        if found not in (MANIFEST_FORMAT, RANGE_FORMAT):
            raise PackageError(
                f"{path} has format {found!r} and this runtime reads formats {MANIFEST_FORMAT} and {RANGE_FORMAT}; "
                "generate the package again with the generator that belongs to this runtime."
            )
        return data

    @cached_property
    def manifest(self) -> Manifest:
        """The validated manifest."""
        path = self.path / "manifest.json"
        try:
            return read_manifest(self._with_a_command_that_runs(self._data))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise PackageError(f"{path} is not a valid manifest: {what}; generate the package again.") from error

    def target(self, name: str) -> TargetManifest:
        """The target called ``name``; PackageError names those emitted where it is not among them."""
        targets = self.manifest.targets
        if name not in targets:
            raise PackageError(f"{self.manifest.name} has no target {name!r}; it was generated for {', '.join(targets)}; {self.why_not(name)}.")
        return targets[name]

    def _with_a_command_that_runs(self, data: dict) -> dict:
        """The manifest's data with the package's own spec.yaml for a spec whose folder it does not name: messages are to be followed on this machine."""
        spec, own = str(data["spec"]), self.path.resolve() / "spec.yaml"
        if not spec.startswith(".../") or self.prebuilt is not None or not own.is_file():
            return data
        here = f"SPEC={shlex.quote(str(own))} OUT={shlex.quote(str(own.parents[1]))}"
        command = re.sub(r"SPEC=('[^']*'|\S+)", lambda _: here, str(data["regenerate"]), count=1)
        return {**data, "spec": str(own), "regenerate": command}

    @cached_property
    def sizes(self) -> "tuple[Package, ...]":
        """The package as one for each of its batches, in ascending order; itself where it was made for one."""
        if not self.manifest.sizes:
            return (self,)
        return tuple(SizeOfPackage(self, manifest) for manifest in self.manifest.sizes)

    def built_as(self, target: TargetManifest) -> TargetManifest:
        """What is compiled where ``target`` is to run: the target itself, here."""
        return target

    @cached_property
    def prebuilt(self) -> Prebuilt | None:
        """The libraries that came with the package in a wheel; None where they are built on this machine."""
        return read_prebuilt(self.path)

    def why_not(self, target: str) -> str:
        """Why the package does not have this target, or what makes it have it, as the end of a sentence."""
        manifest = self.manifest
        if target in manifest.skipped:
            return f"the generator left out {target}, which cannot serve it: {manifest.skipped[target]}"
        if target not in TARGETS:
            return f"{target} is no target, there are {', '.join(TARGETS)}"
        what = "make it again" if self.prebuilt is None else "make a wheel that has it"
        return f'{what}: {manifest.regenerate} TARGETS="{" ".join([*manifest.targets, target])}"'

    @cached_property
    def content(self) -> str:
        """A digest of all that a model of the package runs: the manifest without its explanation, and the sources, or of a wheel the libraries.

        Reading it reads every source, so that a folder which is generated again later changes nothing for this package.
        """
        sizes = [_without_explanation(size) for size in self._data.get("sizes", ())]
        digest = hashlib.sha256(json.dumps([{**_without_explanation(self._data), "sizes": sizes}], sort_keys=True).encode())
        if self.prebuilt is not None:
            digest.update(json.dumps(self.prebuilt.index, sort_keys=True).encode())
            return digest.hexdigest()
        libraries = [*self.manifest.targets.values(), *(entry.target for entry in self.manifest.backward.values())]
        names = sorted({name for target in libraries for name in self._reached(target)})
        for name in names:
            digest.update(f"{name} {hashlib.sha256(self._text(name) or b'').hexdigest()}".encode())
        return digest.hexdigest()

    @cached_property
    def meaning(self) -> str:
        """A digest of what the package computes, whoever generated it and for whichever targets: the spec, and the tensors of a call."""
        manifest = self.manifest
        parts = (manifest.precision, manifest.init_args, manifest.input, manifest.output, manifest.parameters, manifest.batches)
        return hashlib.sha256(repr(parts).encode() + (self._text("spec.yaml") or b"")).hexdigest()

    def read_sources(self, target: TargetManifest) -> dict[str, bytes]:
        """The bytes of a target's sources, and of every file of the package that they include, by file name."""
        names = self._reached(target)
        for name in names:
            if self._text(name) is None:
                why = "there is no such file" if not (self.path / name).exists() else "no permission, or a fault of the disk"
                raise PackageError(f"{self.path / name} cannot be read ({why}); run {self.manifest.regenerate}.")
        return {name: self._texts[name] for name in names}

    def _reached(self, target: TargetManifest) -> list[str]:
        """The names of a target's sources and of what they include from the package."""
        found: list[str] = []
        wanted = list(target.sources)
        while wanted:
            name = wanted.pop(0)
            if name not in found:
                found.append(name)
                included = (match.decode("utf-8", "replace") for match in _INCLUDE.findall(self._text(name) or b""))
                wanted += [name for name in included if "/" not in name and self._text(name) is not None]
        return found

    def _text(self, name: str) -> bytes | None:
        """The bytes of a file of the package as they were when they were first asked for; None where it cannot be read."""
        if name not in self._texts:
            try:
                self._texts[name] = (self.path / name).read_bytes()
            except OSError:
                return None
        return self._texts[name]


def _without_explanation(data: dict) -> dict:
    return {key: value for key, value in data.items() if key not in _EXPLANATION}


class SizeOfPackage(Package):
    """What a package for several batches has for one of them. Its targets are built with those of the other sizes, as one library."""

    def __init__(self, whole: Package, manifest: Manifest):
        super().__init__(whole.path)
        self.whole = whole
        self.manifest = manifest
        self._texts = whole._texts

    def __eq__(self, other):
        return isinstance(other, SizeOfPackage) and (self.whole, self.manifest.batch) == (other.whole, other.manifest.batch)

    def __hash__(self):
        return hash((self.whole, self.manifest.batch))

    def __reduce__(self):
        raise TypeError("a size of a package is found in the package")

    def built_as(self, target: TargetManifest) -> TargetManifest:
        manifest = self.whole.manifest
        return next(
            entry for entry in (*manifest.targets.values(), *(backward.target for backward in manifest.backward.values())) if entry.name == target.name
        )

    @property
    def prebuilt(self) -> Prebuilt | None:
        return self.whole.prebuilt
