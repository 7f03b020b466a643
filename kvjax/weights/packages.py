"""Model files that came with an installed Python package, found without importing it."""

import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from kvjax.errors import WeightsError
from kvjax.weights.check import bullets
from kvjax.weights.gguf import PART_NAME

_REQUIREMENT = re.compile(r"\s*([A-Za-z0-9][A-Za-z0-9._-]*)")


@dataclass(frozen=True)
class PackageFiles:
  """A GGUF file that a package carries.

  Attributes:
    parts: the file, or the byte ranges into which it was cut, in order.
    sha256: hexadecimal checksum of the whole file as published with the package, if it was.
  """

  parts: tuple[Path, ...]
  sha256: str | None


def locate(package: str) -> PackageFiles:
  """The one GGUF file of an installed package, or of the packages that it requires.

  A file cut into parts may be spread over several required packages. The checksum is that of the
  package's SHA256SUMS, or for a file in one piece that of the installation record.

  Args:
    package: name of the distribution, in any spelling (PEP 503: case, "-", "_" and "." are alike).

  Raises:
    WeightsError: the package or one that it requires is not installed (with the command that
      installs it), or the number of GGUF files that are there is not one (listing them).
  """
  name = _normalise(package)
  if not name:
    raise WeightsError(f"expected the name of a Python package, got {package!r}")
  try:
    distribution = metadata.distribution(name)
  except metadata.PackageNotFoundError:
    raise WeightsError(
      f"package {name} is not installed, so its model file cannot be loaded. {_install([name])}"
    ) from None
  files = list(_recorded(distribution))
  absent = []
  if not any(_stem(file) for file in files):
    for other, always in _required(distribution):
      try:
        files += _recorded(metadata.distribution(other))
      except metadata.PackageNotFoundError:
        if always:
          absent.append(other)
  models: dict[str, list[metadata.PackagePath]] = {}
  for file in files:
    if stem := _stem(file):
      models.setdefault(stem, []).append(file)
  if absent and len(models) < 2:
    raise WeightsError(
      f"package {name} holds no *.gguf file itself, and of the packages that it requires "
      f"{', '.join(absent)} are not installed. {_install(absent)}"
    )
  if not models:
    raise WeightsError(
      f"package {name}: expected a *.gguf file among its {len(files)} files, found none. "
      "Reinstall the package if it should hold one, or give a path (gguf:PATH)"
    )
  if len(models) > 1:
    paths = sorted(str(file.locate()) for found in models.values() for file in found)
    raise WeightsError(
      f"package {name} holds {len(models)} GGUF files; give the path of one (gguf:PATH):\n"
      + bullets(paths)
    )
  ((stem, found),) = models.items()
  found.sort(key=_part_number)
  parts = tuple(Path(str(file.locate())) for file in found)
  return PackageFiles(parts, _published(stem, files) or _record_hash(found))


def _normalise(package: str) -> str:
  return re.sub(r"[-_.]+", "-", package.strip()).strip("-").lower()


def _install(names: list[str]) -> str:
  joined = " ".join(names)
  return f"Install with: uv pip install {joined} (or: pip install {joined})"


def _recorded(distribution: metadata.Distribution) -> Iterator[metadata.PackagePath]:
  """Its files, as far as they are on the disk."""
  yield from distribution.files or ()


def _required(distribution: metadata.Distribution) -> Iterator[tuple[str, bool]]:
  """Name of each package that it requires outside extras, and whether it does so everywhere."""
  for line in distribution.requires or ():
    match = _REQUIREMENT.match(line)
    if match and "extra ==" not in line:
      yield _normalise(match[1]), ";" not in line


def _stem(file: metadata.PackagePath) -> str | None:
  """Name of the whole file that `file` is, or is a part of; None if it is no model file."""
  if part := PART_NAME.fullmatch(file.name):
    return part["stem"]
  return file.name if file.name.lower().endswith(".gguf") else None


def _part_number(file: metadata.PackagePath) -> int:
  part = PART_NAME.fullmatch(file.name)
  return int(part["number"]) if part else -1


def _published(stem: str, files: list[metadata.PackagePath]) -> str | None:
  """The checksum of `stem` in a SHA256SUMS file (lines "HEX  NAME", as of sha256sum)."""
  for file in files:
    path = Path(str(file.locate()))
    if file.name.upper() == "SHA256SUMS" and path.is_file():
      for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        match = re.fullmatch(r"([0-9a-fA-F]{64}) [ *](.+)", line.strip())
        if match and Path(match[2]).name == stem:
          return match[1].lower()
  return None


def _record_hash(found: list[metadata.PackagePath]) -> str | None:
  """The checksum of a file in one piece in the installation record (base64 without padding)."""
  if len(found) != 1 or found[0].hash is None or found[0].hash.mode != "sha256":
    return None
  text = found[0].hash.value
  return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)).hex()
