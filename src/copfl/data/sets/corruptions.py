"""The fifteen standard image corruptions at the CIFAR severities of Hendrycks & Dietterich (2019).

The parameters of each severity are the published ones. All images of a call are processed at once, so single
pixels differ from the published CIFAR-10-C.

scipy.ndimage has the blurs and the interpolation, but accumulates in float64: on 1,500 CIFAR-10 images up to
165 of 4.6 million values then round to another byte. Stored results identify their samples by their bytes.
"""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Images = NDArray[np.uint8]  # [n, h, w, 3]
Floats = Any  # float32 [n, h, w, channels] in 0..1; numpy's stubs infer Any for this arithmetic
Generator = np.random.Generator
Pair = tuple[float, float]

CHUNK = 1024  # images processed at a time: bounds the memory of the float copies


def corrupt(images: Images, corruption: str, severity: int, rng: Generator) -> Images:
    """The images under the named corruption, at a severity from 1 (mild) to 5 (strong).

    Args:
        images: uint8 [n, h, w, 3].
        corruption: A name of CORRUPTIONS.
        severity: From 1 to 5.
        rng: Draws.
    """
    function, parameters = CORRUPTIONS[corruption]
    result = np.empty_like(images)
    for start in range(0, len(images), CHUNK):
        chunk = images[start : start + CHUNK]
        result[start : start + CHUNK] = _to_bytes(function(_to_unit(chunk), rng, *parameters[severity - 1]))
    return result


# The corruptions: functions of x, float32 [n, h, w, 3] in 0..1, a generator and the parameters of a severity.


def gaussian_noise(x: Floats, rng: Generator, scale: float) -> Floats:
    """Normal noise added to every value."""
    return x + np.float32(scale) * rng.standard_normal(x.shape, dtype=np.float32)


def shot_noise(x: Floats, rng: Generator, photons: int) -> Floats:
    """Poisson noise, as from a sensor that counts few photons."""
    return (rng.poisson(x * photons) / photons).astype(np.float32)


def impulse_noise(x: Floats, rng: Generator, fraction: float) -> Floats:
    """A fraction of the values set to black or white."""
    draw = rng.random(x.shape, dtype=np.float32)
    return np.where(draw < fraction / 2, 0, np.where(draw < fraction, 1, x))


def defocus_blur(x: Floats, rng: Generator, radius: float, softness: float) -> Floats:
    """The average over a small disk with a soft edge, as from a lens out of focus."""
    offsets = np.arange(-2, 3)
    disk = (np.hypot(offsets[:, None], offsets[None, :]) <= radius).astype(np.float32)
    edge = _gaussian(softness, radius=1)
    kernel = _convolve(np.pad(disk, 1)[None, :, :, None], edge[:, None] * edge[None, :])[0, :, :, 0]
    return _convolve(x, kernel / kernel.sum())


def glass_blur(x: Floats, rng: Generator, softness: float, rounds: int) -> Floats:
    """Every pixel replaced by itself or a neighbour, between two soft blurs, as through frosted glass.

    As in the published set a pixel copies its neighbour above or to the left and does not swap with it.
    """
    n, height, width, _ = x.shape
    x = _blur(x, softness, truncate=4)
    for _ in range(rounds):
        rows = np.maximum(np.arange(height)[:, None] - rng.integers(0, 2, (n, height, width)), 0)
        columns = np.maximum(np.arange(width)[None, :] - rng.integers(0, 2, (n, height, width)), 0)
        x = x[np.arange(n)[:, None, None], rows, columns]
    return _blur(x, softness, truncate=4)


def motion_blur(x: Floats, rng: Generator, radius: int, sigma: float) -> Floats:
    """Blur along one direction per image, within 45 degrees of the horizontal."""
    return _directional_blur(x, radius, sigma, rng.uniform(-45, 45, (len(x),)))


def zoom_blur(x: Floats, rng: Generator, steps: int) -> Floats:
    """The average of the image and its enlargements, in steps of one per cent."""
    n, height, width, channels = x.shape
    blur = np.eye(height * width, dtype=np.float32)  # the average, the image included, as one linear map
    for step in range(steps + 1):
        factor = 1 + step / 100
        blur += np.kron(_enlarge(height, factor), _enlarge(width, factor))
    planes = x.transpose(0, 3, 1, 2).reshape(n * channels, height * width)
    blurred = (planes @ (blur.T / (steps + 2))).reshape(n, channels, height, width)
    return blurred.transpose(0, 2, 3, 1)


def snow(
    x: Floats, rng: Generator, noise: Pair, zoom: float, threshold: float, blur: Pair, keep: float
) -> Floats:
    """Paler images covered with falling flakes."""
    n, height, width, _ = x.shape
    level, spread = noise
    field = level + spread * rng.standard_normal((n, height, width), dtype=np.float32)
    flakes = _enlarge(height, zoom) @ field @ _enlarge(width, zoom).T
    flakes = np.where(flakes < threshold, 0, np.clip(flakes, 0, 1)).astype(np.float32)
    flakes = _directional_blur(flakes[..., None], *blur, rng.uniform(-135, -45, (n,)))
    grey = x @ np.array([0.299, 0.587, 0.114], dtype=np.float32)
    pale = np.maximum(x, grey[..., None] * 1.5 + 0.5)
    return keep * x + (1 - keep) * pale + flakes + flakes[:, ::-1, ::-1]


def frost(x: Floats, rng: Generator, keep: float, cover: float) -> Floats:
    """Images behind a sheet of ice.

    The published set overlays crops of six photographs, which are not part of this package: here the ice is
    generated, bright veins of ridged noise on a bluish film. The weights are the published ones.
    """
    n, height, width, _ = x.shape
    side = 1 << (2 * max(height, width) - 1).bit_length()
    sheets = _ice(6, side, rng)
    sheet, top, left = rng.integers(0, (6, side, side), (n, 3)).T
    rows = (top[:, None] + np.arange(height)) % side  # the noise is periodic: a crop may wrap around
    columns = (left[:, None] + np.arange(width)) % side
    return keep * x + cover * sheets[sheet[:, None, None], rows[:, :, None], columns[:, None, :]]


def fog(x: Floats, rng: Generator, density: float, decay: float) -> Floats:
    """Images behind a cloud of fractal noise."""
    n, height, width, _ = x.shape
    cloud = _plasma(n, 1 << (max(height, width) - 1).bit_length(), decay, rng)[:, :height, :width, None]
    brightest = x.max(axis=(1, 2, 3), keepdims=True)
    return (x + density * cloud) * brightest / (brightest + density)


def brightness(x: Floats, rng: Generator, gain: float) -> Floats:
    """A higher value (of hue, saturation, value) at the same hue and saturation."""
    value = x.max(axis=3, keepdims=True)
    raised = np.minimum(value + np.float32(gain), 1)
    return np.where(value > 0, x * raised / np.maximum(value, 1e-6), raised)


def contrast(x: Floats, rng: Generator, keep: float) -> Floats:
    """Every pixel moved towards the mean colour of its image."""
    mean = x.mean(axis=(1, 2), keepdims=True)
    return (x - mean) * np.float32(keep) + mean


def elastic_transform(x: Floats, rng: Generator, strength: float, sigma: float, jitter: float) -> Floats:
    """Images under a random affine map and a random smooth displacement; the parameters are in image widths.

    With the severity the affine part shrinks while the displacement grows and gets finer: pixels differ no
    more at severity 5 than at 1, but shapes do.
    """
    n, height, width, _ = x.shape
    # Three corners of the middle square of the image move at random; the rest of the plane follows affinely.
    third = min(height, width) // 3
    row, column = np.meshgrid(np.arange(height), np.arange(width), indexing="ij")
    down = ((row - (height // 2 - third)) / (2 * third))[..., None]
    right = ((column - (width // 2 - third)) / (2 * third))[..., None]
    corners = rng.uniform(-jitter * width, jitter * width, (3, n, 1, 1, 2)).astype(np.float32)
    shift = corners[0] * (1 - down - right) + corners[1] * down + corners[2] * right  # [n, h, w, 2]
    if strength:
        field = rng.uniform(-1, 1, (n, height, width, 2)).astype(np.float32)
        shift = shift + strength * width * _blur(field, sigma * width, truncate=3)
    return _interpolate(x, row + shift[..., 0], column + shift[..., 1])


def pixelate(x: Floats, rng: Generator, scale: float) -> Floats:
    """Images shrunk and enlarged again without smoothing."""
    from PIL import Image

    height, width = x.shape[1:3]
    small, box = (int(width * scale), int(height * scale)), Image.Resampling.BOX
    coarse = [
        Image.fromarray(image).resize(small, box).resize((width, height), box) for image in _to_bytes(x)
    ]
    return _to_unit(np.stack([np.asarray(image) for image in coarse]))


def jpeg_compression(x: Floats, rng: Generator, quality: int) -> Floats:
    """Images after JPEG compression of low quality."""
    from PIL import Image

    files = [io.BytesIO() for _ in x]
    for image, file in zip(_to_bytes(x), files, strict=True):
        Image.fromarray(image).save(file, "JPEG", quality=quality)
    return _to_unit(np.stack([np.asarray(Image.open(file)) for file in files]))


CORRUPTIONS: dict[str, tuple[Callable[..., Floats], tuple[tuple[Any, ...], ...]]] = {
    "gaussian_noise": (gaussian_noise, ((0.04,), (0.06,), (0.08,), (0.09,), (0.10,))),
    "shot_noise": (shot_noise, ((500,), (250,), (100,), (75,), (50,))),
    "impulse_noise": (impulse_noise, ((0.01,), (0.02,), (0.03,), (0.05,), (0.07,))),
    "defocus_blur": (defocus_blur, ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1.0, 0.2), (1.5, 0.1))),
    "glass_blur": (glass_blur, ((0.05, 1), (0.25, 1), (0.4, 1), (0.25, 2), (0.4, 2))),
    "motion_blur": (motion_blur, ((6, 1.0), (6, 1.5), (6, 2.0), (8, 2.0), (9, 2.5))),
    "zoom_blur": (zoom_blur, ((5,), (10,), (15,), (20,), (25,))),
    "snow": (
        snow,
        (
            ((0.1, 0.2), 1.0, 0.6, (8, 3), 0.95),
            ((0.1, 0.2), 1.0, 0.5, (10, 4), 0.9),
            ((0.15, 0.3), 1.75, 0.55, (10, 4), 0.9),
            ((0.25, 0.3), 2.25, 0.6, (12, 6), 0.85),
            ((0.3, 0.3), 1.25, 0.65, (14, 12), 0.8),
        ),
    ),
    "frost": (frost, ((1.0, 0.2), (1.0, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45))),
    "fog": (fog, ((0.2, 3.0), (0.5, 3.0), (0.75, 2.5), (1.0, 2.0), (1.5, 1.75))),
    "brightness": (brightness, ((0.05,), (0.1,), (0.15,), (0.2,), (0.3,))),
    "contrast": (contrast, ((0.75,), (0.5,), (0.4,), (0.3,), (0.15,))),
    "elastic_transform": (
        elastic_transform,
        ((0.0, 0.0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    ),
    "pixelate": (pixelate, ((0.95,), (0.9,), (0.85,), (0.75,), (0.65,))),
    "jpeg_compression": (jpeg_compression, ((80,), (65,), (58,), (50,), (40,))),
}


# Filters


def _to_unit(images: Images) -> Floats:
    return images.astype(np.float32) / np.float32(255)


def _to_bytes(x: Floats) -> Images:
    pixels: Images = np.rint(np.clip(x, 0, 1) * 255).astype(np.uint8)
    return pixels


def _gaussian(sigma: float, radius: int) -> Floats:
    """Normal weights at -radius..radius, with sum 1."""
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    return (weights / weights.sum()).astype(np.float32)


def _convolve(x: Floats, kernel: Floats) -> Floats:
    """x under a symmetric kernel of odd sides; the border is mirrored."""
    height, width = x.shape[1:3]
    up, left = kernel.shape[0] // 2, kernel.shape[1] // 2
    padded = np.pad(x, ((0, 0), (up, up), (left, left), (0, 0)), mode="symmetric")
    total = np.zeros_like(x)
    for row, column in np.argwhere(kernel > 1e-6):
        total += kernel[row, column] * padded[:, row : row + height, column : column + width]
    return total


def _blur(x: Floats, sigma: float, truncate: float) -> Floats:
    """x under a Gaussian blur that ends at `truncate` sigmas."""
    weights = _gaussian(sigma, radius=int(truncate * sigma + 0.5))
    return _convolve(_convolve(x, weights[:, None]), weights[None, :])


def _directional_blur(x: Floats, radius: float, sigma: float, degrees: NDArray[np.float64]) -> Floats:
    """x averaged along one direction per image with one-sided Gaussian weights; the border is repeated."""
    n, height, width, _ = x.shape
    weights = np.exp(-0.5 * (np.arange(2 * radius + 1) / sigma) ** 2)
    weights = weights[weights > 1e-3]  # the rest adds less than a grey level
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
    """The matrix [side, side] that enlarges a line about its middle with linear interpolation."""
    middle = (side - 1) / 2
    source = middle + (np.arange(side) - middle) / factor
    return np.maximum(0, 1 - np.abs(source[:, None] - np.arange(side)[None, :])).astype(np.float32)


def _plasma(n: int, side: int, decay: float, rng: Generator) -> Floats:
    """n periodic fields of fractal noise [n, side, side] in 0..1, by midpoint displacement; side is 2^k."""
    field = np.zeros((n, side, side), dtype=np.float32)
    step, amplitude = side, 1.0
    while step > 1:
        half = step // 2

        def displaced(mean: Floats, amplitude: float = amplitude) -> Floats:
            return mean + rng.uniform(-amplitude, amplitude, mean.shape).astype(np.float32)

        corners = field[:, ::step, ::step]
        horizontal = corners + np.roll(corners, -1, axis=2)
        centres = displaced((horizontal + np.roll(horizontal, -1, axis=1)) / 4)
        field[:, half::step, half::step] = centres
        # The middle of an edge lies between its two corners and the centres of the two squares that share it.
        field[:, ::step, half::step] = displaced((horizontal + centres + np.roll(centres, 1, axis=1)) / 4)
        vertical = corners + np.roll(corners, -1, axis=1)
        field[:, half::step, ::step] = displaced((vertical + centres + np.roll(centres, 1, axis=2)) / 4)
        step, amplitude = half, amplitude / decay**2  # the published code applies its decay twice
    low, high = field.min(axis=(1, 2), keepdims=True), field.max(axis=(1, 2), keepdims=True)
    return (field - low) / np.maximum(high - low, 1e-6)


def _ice(n: int, side: int, rng: Generator) -> Floats:
    """n periodic pictures of ice [n, side, side, 3]."""
    film = 0.7 * _plasma(n, side, 1.6, rng) ** 2
    ridges = [(1 - np.abs(2 * _plasma(n, side, 1.4, rng) - 1)) ** 8 for _ in range(2)]
    light = np.clip(0.1 + film + 0.8 * np.maximum(*ridges), 0, 1)
    tint = np.array([0.86, 0.95, 1.0], dtype=np.float32)
    return light[..., None] ** (2 - tint)  # darker ice is bluer, the brightest is white


def _interpolate(x: Floats, rows: Floats, columns: Floats) -> Floats:
    """x at fractional positions [n, h, w], bilinear; the border is mirrored."""
    n, height, width, _ = x.shape
    top, left = np.floor(rows).astype(int), np.floor(columns).astype(int)
    down = (rows - top)[..., None].astype(np.float32)
    right = (columns - left)[..., None].astype(np.float32)

    def at(row: NDArray[np.int_], column: NDArray[np.int_]) -> Floats:
        row, column = row % (2 * height), column % (2 * width)
        row, column = np.minimum(row, 2 * height - 1 - row), np.minimum(column, 2 * width - 1 - column)
        return x[np.arange(n)[:, None, None], row, column]

    upper = at(top, left) * (1 - right) + at(top, left + 1) * right
    lower = at(top + 1, left) * (1 - right) + at(top + 1, left + 1) * right
    return upper * (1 - down) + lower * down
