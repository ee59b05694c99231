"""The treasured objects of the story grammar: one of them is the thread that runs through every story.

`noun` is reserved (see `story_words`): no other sentence of the grammar uses it. `trait` follows the noun when it is
introduced, `daily` is what its owner does with it every day, and `signal` is how it can be made to be noticed from afar, which
lets the climax of a story depend on the object. `{O}` stands for adjective and noun, `{his}` for the owner's possessive.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Thing(NamedTuple):
    noun: str
    soft: bool  # a soft thing tears and is stitched, a hard one cracks and is glued
    trait: str
    daily: str
    signal: str


_TABLE = """
kite      |soft|that danced in the lightest wind    |flew it on every windy day  |let the {O} climb high above the treetops
lantern   |hard|that glowed like a little moon      |lit it every evening        |held the {O} up high, and its glow reached far
drum      |hard|that went rum-tum-tum               |tapped a tune on it every day|beat the {O} until the whole valley heard it
bell      |hard|that rang as clear as water         |rang it every morning       |rang the {O} again and again
basket    |hard|with a handle of braided willow     |carried it everywhere       |swung the {O} above {his} head
scarf     |soft|that was as soft as moss            |wore it in every weather    |waved the {O} like a banner
umbrella  |soft|that opened with a cheerful pop     |took it out in sun and rain |opened the {O} and twirled it round and round
compass   |hard|that always pointed north           |polished it every evening   |followed the needle of the {O}, step by step
flute     |hard|that could sound like a blackbird   |played it at dusk           |blew one long, sweet note on the {O}
trumpet   |hard|that was louder than a rooster      |played it before breakfast  |blew the {O} with all {his} might
teapot    |hard|with a spout like an elephant's trunk|made tea in it every day   |tapped the lid of the {O}, cling, cling, cling
blanket   |soft|that smelled of lavender            |slept under it every night  |spread the {O} wide and waved it
ribbon    |soft|that shone in the sun               |tied it in a bow every day  |tied the {O} to a stick and waved it high
sailboat  |hard|with a mast no taller than a spoon  |sailed it on the pond       |pushed the {O} out onto the bright water
fiddle    |hard|that could laugh and cry            |played it by the fire       |played the fastest tune on the {O}
wagon     |hard|with wheels that squeaked           |pulled it up and down the lane|rattled the {O} over the stones
telescope |hard|that made far things near           |looked at the stars with it |looked through the {O}, left and right
hat       |soft|with a wide, curly brim              |wore it on every walk       |threw the {O} high into the air
cape      |soft|that fluttered at every step         |wore it to every adventure  |spread the {O} like a pair of wings
quilt     |soft|made of a hundred patches           |read stories under it       |hung the {O} from the highest branch
pinwheel  |hard|that whirred in the breeze          |took it up the hill to spin |held the {O} to the wind until it hummed
marble    |hard|with a swirl like a tiny storm      |rolled it down the hall every day|held the {O} up to catch the light
mirror    |hard|that threw spots of sunlight        |polished it every morning   |turned the {O} until it flashed in the light
locket    |hard|that closed with a soft click       |wore it close to the heart  |let the {O} sparkle in the light
thimble   |hard|that fitted like a tiny helmet      |sewed with it in the evenings|tapped the {O} on a stone, tick, tick, tick
whistle   |hard|that could be heard a mile away     |blew it at noon             |blew the {O} three times
harmonica |hard|that hummed like a hive of bees     |played it on the doorstep   |played a bright tune on the {O}
tambourine|hard|with a ring of jingling discs       |danced with it after supper |shook the {O} until it jingled
paintbrush|hard|that never lost a hair              |painted with it every day   |painted a great arrow with the {O}
notebook  |soft|full of small drawings              |drew in it every day        |fanned the bright pages of the {O}
seashell  |hard|that held the sound of the sea      |listened to it every night  |blew into the {O} until it boomed like the sea
hourglass |hard|with sand as fine as sugar          |turned it over every hour   |held the {O} up until its glass sparkled
clock     |hard|that ticked like a small heart      |wound it up every evening   |let the {O} ring out, ding, ding, ding
button    |hard|with four neat holes                |kept it in a safe pocket    |spun the {O} on a string until it sang
bucket    |hard|that never leaked a drop            |fetched water in it         |banged on the {O} with a stick
puppet    |soft|with a smile made of thread         |put on a show with it every day|danced the {O} along the top of the wall
flag      |soft|that snapped in the wind            |hung it out every morning   |waved the {O} from side to side
bugle     |hard|that shone like honey               |played it at sunrise        |sounded the {O}, loud and clear
feather   |soft|that had fallen from a great bird   |wrote letters with it       |held the {O} up, where it gleamed like a flame
crown     |hard|made of twigs and berries           |wore it at every meal       |lifted the {O} high above {his} head
satchel   |soft|with seven secret pockets           |carried it to school        |swung the {O} round and round
tricycle  |hard|with a seat like a saddle           |rode it around the square   |rode the {O} in circles, as fast as it would go
"""


def _parse(line: str) -> Thing:
    noun, kind, trait, daily, signal = (field.strip() for field in line.split("|"))
    return Thing(noun, kind == "soft", trait, daily, signal)


THINGS: Final[tuple[Thing, ...]] = tuple(_parse(line) for line in _TABLE.strip().splitlines())
NOUNS: Final[dict[str, Thing]] = {thing.noun: thing for thing in THINGS}
