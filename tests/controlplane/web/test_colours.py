"""The colours of a chart's lines, seen by every eye. From the stylesheet, without a browser."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

TOKENS = (
    Path(__file__).resolve().parents[3]
    / "controlplane"
    / "web"
    / "static"
    / "web"
    / "css"
    / "tokens.css"
)
# What dichromats see of linear sRGB (Machado, Oliveira and Fernandes, 2009, severity 1).
EYES = {
    "all": np.eye(3),
    "without red": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "without green": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "without blue": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}
# Between OKLab and linear sRGB (Ottosson, 2020).
LMS_OF_LAB = np.array(
    [[1, 0.3963377774, 0.2158037573], [1, -0.1055613458, -0.0638541728],
     [1, -0.0894841775, -1.2914855480]]
)  # fmt: skip
RGB_OF_LMS = np.array(
    [[4.0767416621, -3.3077115913, 0.2309699292], [-1.2684380046, 2.6097574011, -0.3413193965],
     [-0.0041960863, -0.7034186147, 1.7076147010]]
)  # fmt: skip
APART = 0.1  # in OKLab; the two blues that could not be told apart were 0.02 to 0.099


def lab(name: str, theme: str) -> np.ndarray:
    (both,) = re.findall(rf"--{name}: light-dark\((.*)\);", TOKENS.read_text())
    light, dark = re.findall(r"oklch\(([\d.]+) ([\d.]+) ([\d.]+)\)", both)
    lightness, chroma, hue = map(float, light if theme == "light" else dark)
    angle = np.radians(hue)
    return np.array([lightness, chroma * np.cos(angle), chroma * np.sin(angle)])


def seen(colour: np.ndarray, eye: str) -> np.ndarray:
    rgb = np.clip(RGB_OF_LMS @ (LMS_OF_LAB @ colour) ** 3, 0, 1)
    lms = np.linalg.solve(RGB_OF_LMS, np.clip(np.array(EYES[eye]) @ rgb, 0, 1))
    return np.linalg.solve(LMS_OF_LAB, np.cbrt(lms))


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_what_runs_and_what_waits_are_told_apart(theme: str, eye: str) -> None:
    running, waiting = (seen(lab(name, theme), eye) for name in ("accent", "c2"))
    assert np.linalg.norm(running - waiting) > APART
