"""What is said of a scene: questions, each with the only answer that is right.

Always true: answers follow from the scene and the question; the embedded model is trained on no other text.
"""

from dataclasses import dataclass
from random import Random

from .scenes import BACKGROUNDS, COLOURS, DIGITS, SHAPES, Group, Scene

NUMBERS = ("no", "one", "two", "three", "four", "five")
NOTHING, NO_PICTURE = "an empty picture", "there is no picture"
ORDINALS = ("first", "second", "third")
DESCRIBE = (
    "What is this?", "What do you see?", "Describe the picture.", "What is in this picture?", "What is in the image?",
    "Describe this image.", "What does the picture show?", "what is it", "look", "Tell me what you see.", "describe",
    "What is on it?", "What's this?", "What's in the picture?", "Please describe the image.", "",
)  # fmt: skip
OF_ONE = (
    "What is in the {ordinal} picture?", "Describe the {ordinal} image.", "What does the {ordinal} picture show?",
    "and the {ordinal} one?", "What is in the {ordinal} image?",
)  # fmt: skip
COUNT = ("How many?", "How many things are there?", "How many shapes do you see?", "how many are there", "Count them.")
COUNT_KIND = (
    "How many {things} are there?", "How many {things} do you see?", "how many {things}", "Count the {things}.",
)  # fmt: skip
COLOUR = (
    "What colour is it?", "Which colour?", "What colour are they?", "What color is it?", "what color", "Which colours?",
)  # fmt: skip
SHAPE = ("What shape is it?", "Which shape?", "What shapes are there?", "which shapes", "What shapes do you see?")
BACKGROUND = ("What colour is the background?", "Which background?", "What color is the background?", "the background?")
IS_THERE = ("Is there {thing}?", "Do you see {thing}?", "is there {thing}", "Can you see {thing}?")
OTHER = (
    "hello", "thanks", "why", "and now", "is it nice", "who are you", "answer in one sentence", "write a poem",
    "please", "yes", "what can you do", "tell me more", "say it again", "in short", "what happened here",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Turn:
    """A question, on which kind of thing, and its answer."""

    kind: str
    question: str
    answer: str


def describe(scene: Scene) -> str:
    return " and ".join(_named(group, f"{group.colour} ") for group in scene.groups) or NOTHING


def turn_of(kind: str, scene: Scene, random: Random) -> Turn:
    """A question of this kind on a scene."""
    if kind == "describe":
        question, answer = random.choice(DESCRIBE), describe(scene)
    elif kind == "other":
        question, answer = random.choice(OTHER), describe(scene)
    elif kind == "count":
        question, answer = random.choice(COUNT), NUMBERS[scene.count] if scene.count else "none"
    elif kind == "count of one kind":
        question, answer = _count_kind(scene, random)
    elif kind == "colour":
        colours = dict.fromkeys(group.colour for group in scene.groups)
        question, answer = random.choice(COLOUR), " and ".join(colours) or NOTHING
    elif kind == "shape":
        question = random.choice(SHAPE)
        answer = " and ".join(_named(group, "") for group in scene.groups) or NOTHING
    elif kind == "background":
        question, answer = random.choice(BACKGROUND), scene.background
    else:
        question, answer = _is_there(scene, random)
    return Turn(kind, varied(question, random), answer)


KINDS = {  # how often each is asked
    "describe": 6, "other": 1, "count": 2, "count of one kind": 2, "colour": 2, "shape": 2, "background": 1,
    "yes or no": 2,
}  # fmt: skip


def random_turn(scene: Scene, random: Random) -> Turn:
    return turn_of(random.choices([*KINDS], [*KINDS.values()])[0], scene, random)


def on_one_of(number: int, scene: Scene, random: Random) -> Turn:
    """On picture `number`, from 0, of several."""
    question = random.choice(OF_ONE).format(ordinal=ORDINALS[number])
    return Turn("one of several", varied(question, random), describe(scene))


def without_picture(random: Random) -> Turn:
    questions = random.choice((DESCRIBE, COUNT, COLOUR, SHAPE, BACKGROUND, OTHER))
    return Turn("no picture", varied(random.choice(questions), random), NO_PICTURE)


def varied(question: str, random: Random) -> str:
    """As people type it: other cases, and without the mark at its end."""
    if random.random() < 0.3:
        question = question.lower()
    if random.random() < 0.25:
        question = question.rstrip("?.")
    return question


def _count_kind(scene: Scene, random: Random) -> tuple[str, str]:
    shown = [group.kind for group in scene.groups]
    kind = random.choice(shown) if shown and random.random() < 0.7 else random.choice((*SHAPES, *DIGITS[:4]))
    count = sum(group.count for group in scene.groups if group.kind == kind)
    return random.choice(COUNT_KIND).format(things=f"{kind}s"), NUMBERS[count] if count else "none"


def _is_there(scene: Scene, random: Random) -> tuple[str, str]:
    if scene.groups and random.random() < 0.5:
        group = random.choice(scene.groups)
    else:
        of = [*scene.groups, None]
        near = random.choice(of)
        kinds, colours = (*SHAPES, *DIGITS), [*COLOURS]
        keep = near is not None and random.random() < 0.7
        group = Group(
            1,
            near.colour if near is not None and keep else random.choice(colours),
            near.kind if near is not None and not keep else random.choice(kinds),
        )
    there = any((group.colour, group.kind) == (other.colour, other.kind) for other in scene.groups)
    thing = _named(Group(1, group.colour, group.kind), f"{group.colour} ")
    return random.choice(IS_THERE).format(thing=thing), "yes" if there else "no"


def _named(group: Group, adjective: str) -> str:
    """ "three red squares", "an orange 7", "two stars"."""
    if group.count > 1:
        return f"{NUMBERS[group.count]} {adjective}{group.kind}s"
    words = f"{adjective}{group.kind}"
    return f"{'an' if words[0] in 'aeiou8' else 'a'} {words}"


def everything_said() -> list[str]:
    """All questions and answers that the tokenizer is trained on, in order."""
    random = Random(0)
    groups = [Group(count, c, k) for count in (1, 2, 3, 4, 5) for c in COLOURS for k in (*SHAPES, *DIGITS)]
    named = [_named(group, f"{group.colour} ") for group in groups]
    said = [
        *named,
        *(f"{one} and {random.choice(named)}" for one in named),
        *DESCRIBE,
        *COUNT,
        *COLOUR,
        *SHAPE,
        *BACKGROUND,
    ]
    said += [*OTHER, *NUMBERS, *BACKGROUNDS, NOTHING, NO_PICTURE, "none", "yes", "no", "and"]
    for one in (*OF_ONE, *COUNT_KIND, *IS_THERE):
        said += [
            one.format(ordinal=random.choice(ORDINALS), things=f"{kind}s", thing=f"a {kind}")
            for kind in (*SHAPES, *"07")
        ]
    return [text for line in said for text in (line, line.lower())]
