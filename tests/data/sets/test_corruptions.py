"""Laws of the corruptions, and their arithmetic by hand."""

from __future__ import annotations

import numpy as np
import pytest

from copfl.data.sets import corruptions
from copfl.data.sets.corruptions import CORRUPTIONS, Images, corrupt


def scenes(n: int = 12) -> Images:
    """Smooth colourful fields with a bright square each."""
    rng = np.random.default_rng(7)
    fields = np.stack([corruptions._plasma(n, 32, 1.6, rng) for _ in range(3)], axis=-1)
    fields[:, 10:20, 12:22] = rng.random((n, 1, 1, 3))
    return (20 + 200 * fields).astype(np.uint8)


def difference(a: Images, b: Images) -> float:
    return float(np.abs(a.astype(int) - b.astype(int)).mean())


def test_there_are_fifteen() -> None:
    assert len(CORRUPTIONS) == 15


@pytest.mark.parametrize("name", CORRUPTIONS)
@pytest.mark.parametrize("severity", [1, 5])
def test_changes_every_image_and_keeps_dtype_shape_and_argument(name: str, severity: int) -> None:
    images = scenes()
    before = images.copy()
    after = corrupt(images, name, severity, np.random.default_rng(0))
    assert after.dtype == np.uint8
    assert after.shape == images.shape
    assert (images == before).all()
    assert (after != images).any(axis=(1, 2, 3)).all()


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_same_generator_same_images_whatever_the_global_state(name: str) -> None:
    first = corrupt(scenes(3), name, 3, np.random.default_rng(1))
    np.random.seed(5)  # noqa: NPY002
    assert (corrupt(scenes(3), name, 3, np.random.default_rng(1)) == first).all()


# The published numbers of elastic_transform shrink its affine part as the severity grows.
@pytest.mark.parametrize("name", sorted(CORRUPTIONS.keys() - {"elastic_transform"}))
def test_severity_five_deviates_more_than_one(name: str) -> None:
    images = scenes()
    mild, strong = (difference(images, corrupt(images, name, s, np.random.default_rng(0))) for s in (1, 5))
    assert strong > mild


def test_elastic_displaces_more_finely_with_severity() -> None:
    ramp = np.broadcast_to(np.arange(32, dtype=np.uint8)[None, :, None, None] * 8, (40, 32, 32, 3)).copy()

    def roughness(
        severity: int,
    ) -> float:  # an affine map leaves a ramp straight: second differences are only rounding
        after = corrupt(ramp, "elastic_transform", severity, np.random.default_rng(0))[:, 6:26, 6:26, 0]
        return float(np.abs(np.diff(after.astype(int), n=2, axis=2)).mean())

    assert roughness(1) < 1
    assert roughness(5) > 2 * roughness(1)


def test_random_ones_treat_every_image_differently() -> None:
    same = np.repeat(scenes(1), 4, axis=0)
    for name in ("gaussian_noise", "glass_blur", "motion_blur", "snow", "frost", "fog", "elastic_transform"):
        after = corrupt(same, name, 3, np.random.default_rng(0))
        assert len(np.unique(after.reshape(4, -1), axis=0)) == 4, name


def test_chunks_join_without_a_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = corrupt(scenes(), "contrast", 2, np.random.default_rng(0))
    monkeypatch.setattr(corruptions, "CHUNK", 5)
    assert (corrupt(scenes(), "contrast", 2, np.random.default_rng(0)) == whole).all()


def test_contrast_draws_towards_the_mean() -> None:
    image = np.zeros((1, 2, 2, 3), np.uint8)
    image[0, 0] = 200  # mean 100, 0.15 of the difference is kept
    after = corrupt(image, "contrast", 5, np.random.default_rng(0))
    assert after[0, 0, 0, 0] == 115
    assert after[0, 1, 0, 0] == 85


def test_brightness_raises_the_value_at_the_same_hue() -> None:
    image = np.array([[[[102, 51, 0], [0, 0, 0], [255, 128, 0]]]], np.uint8)  # value .4, 0, 1; raised by .2
    after = corrupt(image, "brightness", 4, np.random.default_rng(0))
    assert after[0, 0].tolist() == [[153, 76, 0], [51, 51, 51], [255, 128, 0]]


def test_impulse_noise_hits_the_published_fraction() -> None:
    grey = np.full((20, 32, 32, 3), 100, np.uint8)
    after = corrupt(grey, "impulse_noise", 5, np.random.default_rng(0))
    assert set(np.unique(after)) == {0, 100, 255}
    assert (after != 100).mean() == pytest.approx(0.07, abs=0.004)


def test_gaussian_noise_has_the_published_spread() -> None:
    grey = np.full((20, 32, 32, 3), 128, np.uint8)
    after = corrupt(grey, "gaussian_noise", 3, np.random.default_rng(0))
    assert after.std() / 255 == pytest.approx(0.08, abs=0.001)


@pytest.mark.parametrize(
    "name", ["defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "contrast", "pixelate"]
)
def test_blurs_leave_an_even_image_alone(name: str) -> None:
    even = np.full((2, 32, 32, 3), 90, np.uint8)
    assert (corrupt(even, name, 5, np.random.default_rng(0)) == 90).all()


def test_images_of_another_shape_than_square() -> None:
    wide = scenes(2)[:, :20]
    for name in CORRUPTIONS:
        assert corrupt(wide, name, 2, np.random.default_rng(0)).shape == wide.shape, name


def test_no_images_stay_no_images() -> None:
    assert corrupt(np.zeros((0, 32, 32, 3), np.uint8), "snow", 1, np.random.default_rng(0)).shape == (
        0,
        32,
        32,
        3,
    )
