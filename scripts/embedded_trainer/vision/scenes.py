"""Scenes and pictures of them: up to five shapes or digits, in one or two groups of one colour and kind each.

Always true:
  * a generator's state alone decides a scene and its picture, for one version of Pillow;
  * the things of a scene do not touch, and their colour differs from that of the background.
"""

import math
from dataclasses import dataclass
from random import Random

from PIL import Image, ImageDraw, ImageFont

Colour = tuple[int, int, int]

COLOURS: dict[str, Colour] = {
    "red": (220, 30, 35),
    "orange": (250, 140, 15),
    "yellow": (245, 220, 30),
    "green": (30, 160, 60),
    "blue": (30, 80, 220),
    "purple": (140, 40, 170),
    "black": (15, 15, 15),
    "white": (248, 248, 248),
}
BACKGROUNDS: dict[str, Colour] = {"white": (252, 252, 252), "grey": (175, 175, 175), "black": (10, 10, 10)}
SHAPES = ("circle", "square", "triangle", "star")
DIGITS = tuple("0123456789")
MOST = 5  # things in a scene
_JITTER = 14  # of a channel, at most
_SPACE = 1.12  # of a thing's size that is kept free of others


@dataclass(frozen=True, slots=True)
class Group:
    """Things of one kind and colour."""

    count: int
    colour: str
    kind: str  # one of SHAPES or DIGITS


@dataclass(frozen=True, slots=True)
class Thing:
    """One of a scene's things: its group's number; its middle, as shares of the picture's width and height; and its
    side, as a share of the shorter of these."""

    group: int
    x: float
    y: float
    side: float


@dataclass(frozen=True, slots=True)
class Scene:
    background: str
    groups: tuple[Group, ...]
    things: tuple[Thing, ...]

    @property
    def count(self) -> int:
        return sum(group.count for group in self.groups)


def random_scene(random: Random) -> Scene:
    background = random.choices(list(BACKGROUNDS), (6, 2, 2))[0]
    groups = _random_groups(random, background)
    while (things := _placed(random, groups)) is None:
        pass
    return Scene(background, groups, things)


def draw(scene: Scene, random: Random) -> Image.Image:
    """RGB, of a random size. The background is even or has a slight gradient."""
    width, height = random.randint(96, 220), random.randint(96, 220)
    width, height = max(width, height * 3 // 4), max(height, width * 3 // 4)
    image = Image.new("RGB", (width, height), _near(random, BACKGROUNDS[scene.background], 6))
    pen = ImageDraw.Draw(image)
    colours = [_near(random, COLOURS[group.colour], _JITTER) for group in scene.groups]
    for thing in scene.things:
        side = thing.side * min(width, height)
        _draw_thing(
            pen, scene.groups[thing.group].kind, thing.x * width, thing.y * height, side, colours[thing.group], random
        )
    return image


def _random_groups(random: Random, background: str) -> tuple[Group, ...]:
    several = random.choices((0, 1, 2), (2, 62, 36))[0]
    colours = [name for name in COLOURS if name != background]
    groups = list[Group]()
    for _ in range(several):
        kind = random.choice(SHAPES) if random.random() < 0.75 else random.choice(DIGITS)
        most = MOST - sum(group.count for group in groups) - (several - len(groups) - 1)
        group = Group(random.randint(1, most), random.choice(colours), kind)
        if any((group.colour, group.kind) == (other.colour, other.kind) for other in groups):
            return _random_groups(random, background)
        groups.append(group)
    return tuple(sorted(groups, key=_order))


def _order(group: Group) -> tuple[int, int, str]:
    """As they are named: the larger number first."""
    return -group.count, [*COLOURS].index(group.colour), group.kind


def _placed(random: Random, groups: tuple[Group, ...]) -> tuple[Thing, ...] | None:
    """None: there was no place for one of them."""
    count = sum(group.count for group in groups)
    most = (0.9, 0.9, 0.48, 0.42, 0.36, 0.33)[count]
    things = list[Thing]()
    for number, group in enumerate(groups):
        for _ in range(group.count):
            side = random.uniform(0.24 if group.kind in SHAPES else 0.27, most)
            for _ in range(30):
                x, y = (random.uniform(side / 2 + 0.01, 0.99 - side / 2) for _ in "xy")
                if all(max(abs(x - o.x), abs(y - o.y)) > _SPACE * (side + o.side) / 2 for o in things):
                    break
            else:
                return None
            things.append(Thing(number, x, y, side))
    return tuple(things)


def _near(random: Random, colour: Colour, most: int) -> Colour:
    red, green, blue = (min(255, max(0, channel + random.randint(-most, most))) for channel in colour)
    return red, green, blue


def _draw_thing(
    pen: ImageDraw.ImageDraw, kind: str, x: float, y: float, side: float, colour: Colour, random: Random
) -> None:
    half, turn = side / 2, random.uniform(-0.25, 0.25)
    if kind in DIGITS:
        font = ImageFont.load_default(size=1.25 * side)
        pen.text((x, y), kind, fill=colour, font=font, anchor="mm", stroke_width=side / 40)
    elif kind == "circle":
        pen.ellipse((x - half, y - half, x + half, y + half), fill=colour)
    elif kind == "square":
        pen.polygon(_corners(x, y, [half * math.sqrt(2) * 0.9] * 4, turn * 0.6 + math.pi / 4), fill=colour)
    elif kind == "triangle":
        pen.polygon(_corners(x, y + half * 0.15, [half * 1.1] * 3, turn - math.pi / 2), fill=colour)
    else:
        pen.polygon(_corners(x, y, [half * 1.1, half * 0.45] * 5, turn - math.pi / 2), fill=colour)


def _corners(x: float, y: float, radii: list[float], start: float) -> list[tuple[float, float]]:
    step = 2 * math.pi / len(radii)
    return [(x + r * math.cos(start + i * step), y + r * math.sin(start + i * step)) for i, r in enumerate(radii)]
