"""Openings: each introduces the protagonist, the object, the friend and the place, so that a prompt holds every fact.

See `story_facts.slot_values` for the slots and `story_template` for the notation.
"""

from __future__ import annotations

from typing import Final

from training.story_template import Template, compile_passages

OPENINGS: Final[list[Template]] = compile_passages("""
[Once upon a time|Long ago|Once], in [the village of|the sleepy village of|a village called] {place}, there lived
{a_S} [called|named] {N}. {N} had {a_O} {trait}, and {he} {daily}. {His} best friend was {F} the {FS}.

{N} the {S} lived {home} [near|not far from] {place}. {He} did not own much, but {he} owned {a_O} {trait}, and that
was enough. Next door lived {F} the {FS}, who [laughed at all {his} jokes|was {his} dearest friend|came over every
day].

In {place} everybody knew {N}. [Who else|What other {S}] had {a_O} {trait}? {N} {daily}, and {F} the {FS}, {his}
[best|oldest] friend, [liked to keep {him} company|always came along|was never far away].

There was once {a_S} [named|called] {N}, who lived {home}. Of all the things in the house {he} liked one best: {a_O}
{trait}. "[Take good care of it|Look after it well]," said {F} the {FS}, {his} friend from the other end of {place},
and {N} [always did|did].

"Good morning, {N}!" called {F} the {FS} [over the fence|across the garden|from the lane]. {N} the {S} waved back and
held up {a_O} {trait}. [Nobody in {place} had anything like it|There was no other like it in {place}], and {he}
{daily}.

This is the story of {N}, a [small|young|curious|cheerful|shy] {S} from {place}, and of {a_O} {trait}. {N} {daily}.
[It was a present from {his} grandmother|{He} had found it on the beach|{He} had got it for {his} birthday], and {F}
the {FS} thought it the finest thing in the world.

[Far away|Far, far away], where the river bends, lies {place}. A [young|small|kind] {S} called {N} lived there {home},
together with {a_O} {trait}. Every day {F} the {FS} [knocked at the door|came to visit], and the two friends [went out
to play|made plans].

Two friends lived in {place}: {N}, who was {a_S}, and {F}, who was {a_FS}. {N} had {a_O} {trait}, and {he} {daily}.
{F} had [a loud laugh|a very good memory|a head full of ideas|quick feet], and [they shared everything|that was just
as good].

When {N} the {S} was very small, {his} grandfather gave {him} {a_O} {trait}. "[Keep it safe|It will bring you luck],"
he said. {N} kept it [near|close] ever after, {home} in {place}, and showed it to nobody but {his} friend {F} the
{FS}.

If you ever go to {place}, ask for {N}. You will find a [friendly|bright-eyed|rather small] {S} with {a_O} {trait},
and most likely {F} the {FS} will be there as well, for [the two are the best of friends|they do everything together].

{N} was a [dreamy|brave|careful|lively] little {S}, and {F} was a [patient|funny|clever|bold] young {FS}. They had
been friends since the day {N} came to {place} with nothing but {a_O} {trait}. {N} {daily}, [come rain or
shine|whatever happened].

[On the edge of|Just outside] {place}, {home}, lived {N} the {S}. On a shelf by the door lay {a_O} {trait}. "[What a
treasure|How lovely]!" said everyone who came by, and {F} the {FS}, {his} best friend, [said it most often|said it
every single time].
""")

# The new friend has only just come to the village, so that plot opens differently.
NEW_FRIEND_OPENINGS: Final[list[Template]] = compile_passages("""
{N} the {S} lived {home} in {place}. {He} had {a_O} {trait}, but nobody to share it with. Then, one [spring|autumn]
day, {F} the {FS} moved in next door.

[Nobody in {place} was as shy as|The shyest creature in {place} was] {N}, a small {S} with {a_O} {trait}. {N} {daily},
always alone. One [rainy|sunny] day a new neighbour came up the lane, {a_FS} by the name of {F}.

"Who is that?" wondered {N} the {S}, peeping [through the window|over the hedge]. A cart stood in the lane of {place},
piled high with boxes, and on top of the boxes sat {F} the {FS}. {N} held on tight to {his} treasure, {a_O} {trait}.
So far it had been {his} only friend.

There were many doors in {place}, and behind one of them lived {N}, {a_S} with {a_O} {trait}. {N} {daily}, but always
alone, until {F} the {FS} came to town.

On the day {F} the {FS} came to live in {place}, {N} the {S} was sitting on the doorstep with {a_O} {trait}. {N}
{daily}, and {he} [did it all alone|had never once had company].
""")
