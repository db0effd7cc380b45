"""The fifteen standard image corruptions at the CIFAR severities of Hendrycks & Dietterich (2019).

Every function takes images, uint8 [n, h, w, 3], a severity from 1 to 5 and a generator, and gives images of the same
shape. The numbers per severity are the published ones; the code works on all images of a call together, so single
pixels differ from the published CIFAR-10-C.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from copfl.errors import UsageError, unknown

Images = NDArray[np.uint8]  # [n, h, w, 3]
Floats = NDArray[np.floating[Any]]  # float32, but where numpy's types lose sight of it

CHUNK = 1024  # images worked on at a time: keeps the float copies of a large set small


def corrupt(images: Images, corruption: str, severity: int, rng: np.random.Generator) -> Images:
    """The images under the named corruption."""
    if corruption not in CORRUPTIONS:
        raise unknown("corruption", corruption, CORRUPTIONS)
    if isinstance(severity, bool) or not isinstance(severity, int) or not 1 <= severity <= 5:
        raise UsageError(f"severity is {severity!r}; it must be a whole number from 1 (mild) to 5 (strong)")
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
        raise UsageError(
            f"images are {images.dtype} {list(images.shape)}; they must be uint8 [n, height, width, 3]"
        )
    apply = CORRUPTIONS[corruption]
    parts = [apply(images[start : start + CHUNK], severity, rng) for start in range(0, len(images), CHUNK)]
    return np.concatenate(parts) if parts else images.copy()


# Noise


def gaussian_noise(images: Images, severity: int, rng: np.random.Generator) -> Images:
    """Images with normal noise added to every value."""
    spread = (0.04, 0.06, 0.08, 0.09, 0.10)[severity - 1]
    return _to_bytes(
        _to_unit(images) + np.float32(spread) * rng.standard_normal(images.shape, dtype=np.float32)
    )


def shot_noise(images: Images, severity: int, rng: np.random.Generator) -> Images:
    """Images as a counter of few photons sees them: Poisson noise."""
    photons = (500, 250, 100, 75, 50)[severity - 1]
    return _to_bytes((rng.poisson(_to_unit(images) * photons) / photons).astype(np.float32))


def impulse_noise(images: Images, severity: int, rng: np.random.Generator) -> Images:
    """Images with a share of the values set to black or white."""
    share = (0.01, 0.02, 0.03, 0.05, 0.07)[severity - 1]
    draw = rng.random(images.shape, dtype=np.float32)
    return np.where(draw < share / 2, np.uint8(0), np.where(draw < share, np.uint8(255), images))


# Blur


def defocus_blur(images: Images, severity: int, rng: np.random.Generator) -> Images:
    """Images through a lens out of focus: averaged over a small soft-edged disk."""
    radius, softness = ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1))[severity - 1]
    reach = np.arange(-2, 3)
    disk = (np.hypot(reach[:, None], reach[None, :]) <= radius).astype(np.float32)
    edge = _bell(softness, radius=1)
    kernel = _convolve(np.pad(disk, 1)[None, :, :, None], edge[:, None] * edge[None, :])[0, :, :, 0]
    return _to_bytes(_convolve(_to_unit(images), kernel / kernel.sum()))


def glass_blur(images: Images, severity: int, rng: np.random.Generator) -> Images:
    """Images through frosted glass: every pixel takes the value of itself or a neighbour, between two soft blurs.

    As in the published set a pixel copies its neighbour above or to the left and does not swap with it.
    """
    softness, rounds = ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))[severity - 1]
    x = _blur(_to_unit(images), softness, truncate=4)
    n, height, width, _ = images.shape
    for _ in range(rounds):
        rows = np.maximum(np.arange(height)[:, None] - rng.integers(0, 2, (n, height, width)), 0)
        columns = np.maximum(np.arange(width)[None, :] - rng.integers(0, 2, (n, height, width)), 0)
        x = x[np.arange(n)[:, None, None], rows, columns]
    return _to_bytes(_blur(x, softness, truncate=4))


def motion_blur(images: Images, severity: int, rng: np.random.Generator) -> Images:
    """Images smeared along one direction each, within 45 degrees of the horizontal."""
    radius, sigma = ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5))[severity - 1]
    return _to_bytes(_smear(_to_unit(images), radius, sigma, rng.uniform(-45, 45, (len(images),))))


def zoom_blur(images: Images, severity: int, rng: np.random.Generator) -> Images:
    """Images averaged with enlargements of themselves, in steps of one per cent."""
    steps = (5, 10, 15, 20, 25)[severity - 1]
    n, height, width, channels = images.shape
    blur = np.eye(
        height * width, dtype=np.float32
    )  # one linear map for the whole average, the plain image included
    for step in range(steps + 1):
        factor = 1 + step / 100
        blur += np.kron(_enlarge(height, factor), _enlarge(width, factor))
    planes = _to_unit(images).transpose(0, 3, 1, 2).reshape(n * channels, height * width)
    blurred = (planes @ (blur.T / (steps + 2))).reshape(n, channels, height, width)
    return _to_bytes(blurred.transpose(0, 2, 3, 1))


# Weather


def snow(images: Images, severity: int, rng: np.random.Generator) -> Images:
    """Images paled and covered with falling flakes."""
    level, spread, zoom, threshold, radius, sigma, keep = (
        (0.1, 0.2, 1.0, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1.0, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    )[severity - 1]
    n, height, width, _ = images.shape
    noise = level + spread * rng.standard_normal((n, height, width), dtype=np.float32)
    flakes = _enlarge(height, zoom) @ noise @ _enlarge(width, zoom).T
    flakes = np.where(flakes < threshold, 0, np.clip(flakes, 0, 1)).astype(np.float32)
    flakes = _smear(flakes[..., None], radius, sigma, rng.uniform(-135, -45, (n,)))
    x = _to_unit(images)
    grey = x @ np.array([0.299, 0.587, 0.114], dtype=np.float32)
    pale = np.maximum(x, grey[..., None] * 1.5 + 0.5)
    return _to_bytes(keep * x + (1 - keep) * pale + flakes + flakes[:, ::-1, ::-1])


def frost(images: Images, severity: int, rng: np.random.Generator) -> Images:
    """Images behind a sheet of ice.

    The published set overlays crops of six photographs of ice, which are not part of this package: here the ice is
    drawn, bright veins of ridged noise on a bluish film. The weights of image and ice are the published ones.
    """
    keep, cover = ((1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))[severity - 1]
    n, height, width, _ = images.shape
    side = 1 << (2 * max(height, width) - 1).bit_length()
    sheets = _ice(6, side, rng)
    sheet, top, left = rng.integers(0, (6, side, side), (n, 3)).T
    rows = (top[:, None] + np.arange(height)) % side  # the noise is periodic: a crop may wrap around
    columns = (left[:, None] + np.arange(width)) % side
    crops = sheets[sheet[:, None, None], rows[:, :, None], columns[:, None, :]]
    return _to_bytes(keep * _to_unit(images) + cover * crops)


def fog(images: Images, severity: int, rng: np.random.Generator) -> Images:
    """Images behind a cloud of fractal noise."""
    density, decay = ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75))[severity - 1]
    n, height, width, _ = images.shape
    cloud = _plasma(n, 1 << (max(height, width) - 1).bit_length(), decay, rng)[:, :height, :width, None]
    x = _to_unit(images)
    brightest = x.max(axis=(1, 2, 3), keepdims=True)
    return _to_bytes((x + density * cloud) * brightest / (brightest + density))


# Light


def brightness(images: Images, severity: int, rng: np.random.Generator) -> Images:
    """Images with a raised value at the same hue and saturation."""
    gain = (0.05, 0.1, 0.15, 0.2, 0.3)[severity - 1]
    x = _to_unit(images)
    value = x.max(axis=3, keepdims=True)
    raised = np.minimum(value + np.float32(gain), 1)
    return _to_bytes(np.where(value > 0, x * raised / np.maximum(value, 1e-6), raised))


def contrast(images: Images, severity: int, rng: np.random.Generator) -> Images:
    """Images drawn towards their mean colour."""
    keep = (0.75, 0.5, 0.4, 0.3, 0.15)[severity - 1]
    x = _to_unit(images)
    mean = x.mean(axis=(1, 2), keepdims=True)
    return _to_bytes((x - mean) * np.float32(keep) + mean)


# Geometry and coding


def elastic_transform(images: Images, severity: int, rng: np.random.Generator) -> Images:
    """Images under a random affine map and a random smooth displacement.

    The published numbers trade one for the other: the affine part shrinks with the severity while the displacement
    grows and gets finer, so pixels do not differ more at severity 5 than at 1, but shapes do.
    """
    strength, smoothness, jitter = (
        (0.0, 0.0, 0.08),
        (0.05, 0.2, 0.07),
        (0.08, 0.06, 0.06),
        (0.1, 0.04, 0.05),
        (0.1, 0.03, 0.03),
    )[severity - 1]  # in widths of the image
    n, height, width, _ = images.shape
    # Three corners of the middle square of the image move at random, and everything else goes with them.
    third = min(height, width) // 3
    row = (np.arange(height)[:, None] - (height // 2 - third)) / (2 * third)
    column = (np.arange(width)[None, :] - (width // 2 - third)) / (2 * third)
    corner, below, beside = rng.uniform(-jitter * width, jitter * width, (3, n, 1, 1, 2)).astype(np.float32)
    share = row[..., None] + 0 * column[..., None], column[..., None] + 0 * row[..., None]
    shift = corner * (1 - share[0] - share[1]) + below * share[0] + beside * share[1]  # [n, h, w, 2]
    if strength:
        field = rng.uniform(-1, 1, (n, height, width, 2)).astype(np.float32)
        shift = shift + strength * width * _blur(field, smoothness * width, truncate=3)
    return _to_bytes(
        _sample(
            _to_unit(images), np.arange(height)[:, None] + shift[..., 0], np.arange(width) + shift[..., 1]
        )
    )


def pixelate(images: Images, severity: int, rng: np.random.Generator) -> Images:
    """Images shrunk and enlarged again without smoothing."""
    from PIL import Image

    scale = (0.95, 0.9, 0.85, 0.75, 0.65)[severity - 1]
    height, width = images.shape[1:3]
    small = int(width * scale), int(height * scale)
    box = Image.Resampling.BOX
    return np.stack(
        [np.asarray(Image.fromarray(i).resize(small, box).resize((width, height), box)) for i in images]
    )


def jpeg_compression(images: Images, severity: int, rng: np.random.Generator) -> Images:
    """Images as JPEG of low quality stores them."""
    from PIL import Image

    quality = (80, 65, 58, 50, 40)[severity - 1]

    def stored(image: Images) -> Images:
        file = io.BytesIO()
        Image.fromarray(image).save(file, "JPEG", quality=quality)
        return np.asarray(Image.open(file))

    return np.stack([stored(image) for image in images])


CORRUPTIONS: dict[str, Callable[[Images, int, np.random.Generator], Images]] = {
    "gaussian_noise": gaussian_noise,
    "shot_noise": shot_noise,
    "impulse_noise": impulse_noise,
    "defocus_blur": defocus_blur,
    "glass_blur": glass_blur,
    "motion_blur": motion_blur,
    "zoom_blur": zoom_blur,
    "snow": snow,
    "frost": frost,
    "fog": fog,
    "brightness": brightness,
    "contrast": contrast,
    "elastic_transform": elastic_transform,
    "pixelate": pixelate,
    "jpeg_compression": jpeg_compression,
}


# What they are made of. x is float [n, h, w, channels] with values in 0..1.


def _to_unit(images: Images) -> Floats:
    return images.astype(np.float32) / np.float32(255)


def _to_bytes(x: Floats) -> Images:
    pixels: Images = np.rint(np.clip(x, 0, 1) * 255).astype(np.uint8)
    return pixels


def _bell(sigma: float, radius: int) -> Floats:
    """Normal weights at -radius..radius, with sum 1."""
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    normalised: Floats = (weights / weights.sum()).astype(np.float32)
    return normalised


def _convolve(x: Floats, kernel: Floats) -> Floats:
    """x under a kernel of odd sides, which is symmetric; the border is mirrored."""
    height, width = x.shape[1:3]
    up, left = kernel.shape[0] // 2, kernel.shape[1] // 2
    padded = np.pad(x, ((0, 0), (up, up), (left, left), (0, 0)), mode="symmetric")
    total = np.zeros_like(x)
    for row, column in np.argwhere(kernel > 1e-6):
        total += kernel[row, column] * padded[:, row : row + height, column : column + width]
    return total


def _blur(x: Floats, sigma: float, truncate: float) -> Floats:
    """x under a normal blur, cut off at `truncate` sigmas."""
    weights = _bell(sigma, radius=int(truncate * sigma + 0.5))
    return _convolve(_convolve(x, weights[:, None]), weights[None, :])


def _smear(x: Floats, radius: int, sigma: float, degrees: NDArray[np.float64]) -> Floats:
    """x averaged along one direction per image, with weights of half a bell; the border is repeated."""
    n, height, width, _ = x.shape
    weights = np.exp(-0.5 * (np.arange(2 * radius + 1) / sigma) ** 2)
    weights = weights[weights > 1e-3]  # what is cut off is less than a grey level
    weights /= weights.sum()
    down, right = np.sin(np.deg2rad(degrees)), np.cos(np.deg2rad(degrees))
    image = np.arange(n)[:, None, None]
    total = np.zeros_like(x)
    for distance, weight in enumerate(weights):
        rows = np.arange(height) + np.rint(distance * down).astype(int)[:, None]
        columns = np.arange(width) + np.rint(distance * right).astype(int)[:, None]
        rows, columns = np.clip(rows, 0, height - 1), np.clip(columns, 0, width - 1)
        total += np.float32(weight) * x[image, rows[:, :, None], columns[:, None, :]]
    return total


def _enlarge(side: int, factor: float) -> Floats:
    """The matrix [side, side] that enlarges a line about its middle, linear between the pixels."""
    middle = (side - 1) / 2
    source = middle + (np.arange(side) - middle) / factor
    weights: Floats = np.maximum(0, 1 - np.abs(source[:, None] - np.arange(side)[None, :])).astype(np.float32)
    return weights


def _plasma(n: int, side: int, decay: float, rng: np.random.Generator) -> Floats:
    """n periodic fields of fractal noise [n, side, side] in 0..1 by midpoint displacement; side is a power of two."""
    field = np.zeros((n, side, side), dtype=np.float32)
    step, swing = side, 1.0
    while step > 1:
        half = step // 2

        def displaced(mean: Floats, swing: float = swing) -> Floats:
            return mean + rng.uniform(-swing, swing, mean.shape).astype(np.float32)

        corners = field[:, ::step, ::step]
        beside = corners + np.roll(corners, -1, axis=2)
        centres = displaced((beside + np.roll(beside, -1, axis=1)) / 4)
        field[:, half::step, half::step] = centres
        # The middle of an edge lies between its two corners and the centres of the two squares that share it.
        field[:, ::step, half::step] = displaced((beside + centres + np.roll(centres, 1, axis=1)) / 4)
        below = corners + np.roll(corners, -1, axis=1)
        field[:, half::step, ::step] = displaced((below + centres + np.roll(centres, 1, axis=2)) / 4)
        step, swing = half, swing / decay**2  # the published code applies its decay twice
    low, high = field.min(axis=(1, 2), keepdims=True), field.max(axis=(1, 2), keepdims=True)
    scaled: Floats = (field - low) / np.maximum(high - low, 1e-6)
    return scaled


def _ice(n: int, side: int, rng: np.random.Generator) -> Floats:
    """n periodic pictures of ice [n, side, side, 3]."""

    def ridges() -> Floats:
        return (1 - np.abs(2 * _plasma(n, side, 1.4, rng) - 1)) ** 8

    film = 0.7 * _plasma(n, side, 1.6, rng) ** 2
    veins = np.maximum(ridges(), ridges())
    light = np.clip(0.1 + film + 0.8 * veins, 0, 1)
    tint = np.array([0.86, 0.95, 1.0], dtype=np.float32)
    return light[..., None] ** (2 - tint)  # darker ice is bluer, the brightest is white


def _sample(x: Floats, rows: Floats, columns: Floats) -> Floats:
    """x read at fractional positions [n, h, w], linear between the pixels; the border is mirrored."""
    n, height, width, _ = x.shape
    top, left = np.floor(rows).astype(int), np.floor(columns).astype(int)
    down = (rows - top)[..., None].astype(np.float32)
    right = (columns - left)[..., None].astype(np.float32)
    image = np.arange(n)[:, None, None]

    def at(row: NDArray[np.int_], column: NDArray[np.int_]) -> Floats:
        pixels: Floats = x[image, _mirrored(row, height), _mirrored(column, width)]
        return pixels

    upper = at(top, left) * (1 - right) + at(top, left + 1) * right
    lower = at(top + 1, left) * (1 - right) + at(top + 1, left + 1) * right
    between: Floats = upper * (1 - down) + lower * down
    return between


def _mirrored(position: NDArray[np.int_], side: int) -> NDArray[np.int_]:
    """Positions folded into 0..side-1."""
    folded = position % (2 * side)
    return np.minimum(folded, 2 * side - 1 - folded)
