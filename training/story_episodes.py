"""Episodes that fit into the middle of any plot, and miniatures that are a whole story in themselves.

In all but `CARRIED` the object may be lost or broken. `LEISURELY` needs a plot without haste, `ROAD` one with a
journey, `OVERNIGHT` one without a deadline. The protagonist and the friend are always together.
"""

from __future__ import annotations

from typing import Final

from training.story_template import Template, compile_passages

ANYWHERE: Final[list[Template]] = compile_passages("""
"I am hungry," [said|sighed|admitted] {F}. {N} looked in {his} bag and found [some {snack}|a parcel of {snack}]. They
sat down among the {flower} and shared everything, half and half. [It tasted better than anything at home.|The last
crumbs went to a family of ants.|Nothing tastes as good as lunch in the open air.]

"[Listen|Hush|Did you hear that]," whispered {F}. There was {sound}. {N} [held {his} breath|stood quite still]. [Out
of the bushes|From behind a {tree}] came {helper}. "[I hope I did not frighten you|Pardon me]," said {the_helper}.
"[Only a little|Not at all]," said {N}, and all three of them [burst out laughing|laughed].

{Helper} was sitting {spot}, [looking {worry}|with a long face]. "[I have lost my glasses|My cart is stuck in the
mud|My roof is leaking|I cannot reach the apples]," said {the_helper}. {N} and {F} [rolled up their sleeves|helped at
once], and soon [it was put right|all was well]. "[One good turn deserves another|I shall not forget it]," said
{the_helper}. "[Go {path}, and|If you go {path},] you will not go wrong."

"Do you know what I think?" said {F}. "[What?|Tell me,]" said {N}. "I think that [the best days begin badly|the clouds
look like {food}|we ought to do this every year]." {N} [had to smile|laughed out loud]. That was just like {F}:
whatever happened, a {FS} like that [was never {worry} for long|found something to be {joy} about].
""")

LEISURELY: Final[list[Template]] = compile_passages("""
[Then|Just then|All at once] {rain}. "[Quick, under the {tree}|Let us wait under that {tree}]!" cried {F}. They
[huddled together|sat close together] and told each other riddles until it was over. [{F} knew all the answers.|{N}
knew a very good one about a snail.|Most of the riddles were about food.] [Then they went on {path}.|"On we go," said
{N}.]

A [stranger|traveller] was resting [by the roadside|at the crossroads] with a heavy pack. "{hello}!" [the stranger
called|came the greeting]. "That is {tongue}," [whispered|explained] {F}. "{hello}!" {N} called back, as well as {he}
could. They shared their {drink}, and the stranger said, "{thanks}!" [and bowed|and waved for a long time|and gave
them each a ripe plum].

[By and by they came to|Round the bend stood] an inn where [walkers|travellers] could rest, [with a bench in the
sun|with ivy up to the roof]. {Helper} brought them {drink} and {food}. "[So you are the ones with the {O}|Tell me
about this {O}]," said {the_helper}. {N} [talked and talked|told everything], and {F} [added the funny parts|ate a
second helping].

[For a while|For a time] they forgot [all about their task|their worries] and played {game} {spot}. {N} [won
twice|laughed until {his} sides ached], and {F} [won once|cheated only a little]. "[Enough|That is enough now]," said
{N} at last. "[We have something to do|The {O} comes first]."
""")

ROAD: Final[list[Template]] = compile_passages("""
[On the way|Before long|A little later] they met {helper}. "[Where are you two going|What brings you here|Why in such
a hurry]?" asked {the_helper}. {N} told {hhim} [the whole story|the story of the {O}, from the beginning].
{The_helper} listened and [nodded slowly|scratched {hhis} chin|thought for a while]. "{saying}," {hhe} said [at
last|kindly|with a smile]. {N} [remembered those words|kept those words in mind].

They came to a [wide|swift|cold] stream, and there was no bridge. [{F} put one paw in and shivered.|"How do we get
across?" asked {F}.] {N} [looked up and down the bank|thought hard]. "[That log|Those stones|That fallen tree]!" {he}
[said|cried], and one behind the other, with their arms stretched out, they crossed. {F} [wobbled once, but|nearly
slipped, but] {N} held {fhim} by the hand.

{N} began to feel {worry}. "What if [it all goes wrong|we never manage it|we are too late]?" {he} asked. {F} [took
{N}'s hand|put an arm around {him}]. "Then we will [think of something else|try again]," said {F}. "You are not alone,
{N}." [That helped more than anything.|And {N} felt a little braver.|{N} wiped {his} eyes and nodded.]

The road [led|took] them {path}. [Everything smelled of {smell}.|The air smelled of {smell}.] {F} made up a song as
they walked: {song}. {N} joined in, [a little out of tune|at the top of {his} voice], and [the miles went by|the birds
fell silent to listen].

At a fork in the road stood a signpost, but [the rain had washed the letters away|somebody had turned it the wrong way
round]. "Left," said {F}. "Right," said {N}. They [argued for a while|looked at each other]. [In the end|Then] they
[tossed a pebble|asked {helper}], and went {path}. [It was the right way.|And that was the right way after all.]

A [baby bird|small beetle|young starling|tiny caterpillar] was [lying|sitting] in the middle of the path. "[I cannot
find my way home|I fell|I want my mother]," it [sobbed|squeaked]. {N} and {F} [looked at each other|did not think
twice]. They [carried it|took it] {path}, [slowly and gently|step by step], until they found its family. "[How can we
thank you?|Bless you both!]" they cried. "[It was nothing|Gladly done]," said {N}.

{F} [stumbled|tripped] over a root. "Ouch! My foot!" {fhe} cried. {N} knelt down, cooled it with [wet moss|water from
the stream] and tied a leaf around it. "[Lean on me|You can lean on me]," said {N}. [So they went on more slowly|They
walked on side by side], and {F} was [so {joy} to have such a friend|hopping again before long].

[Halfway up the hill|At the top of the hill] they stopped to catch their breath. [Below them lay|They could see] the
roofs of {place}, [no bigger than pebbles|small as toys]. "[How far we have come|Look how far we have walked]!" said
{F}. {N} thought of the {O} and [took a deep breath|walked on a little faster].
""")

CARRIED: Final[list[Template]] = compile_passages("""
A gust of wind [snatched at|tugged at] the {O}. {N} [grabbed it just in time|held on with both hands]. "[Hold
tight|Careful]!" called {F}. After that {N} [tied it to {his} wrist with a bit of string|kept a firm grip on it], to
be on the safe side.

{Helper} [stopped and stared|came closer to look]. "[What a fine {o}|I have never seen such a {o}]," said
{the_helper}. "[I will give you my house for it!|Would you sell it for a sack of gold?|Will you swap it for a jar of
pickles?]" {N} [shook {his} head|did not need to think]. "[Thank you, but no|It is not for sale]," {he} said. "[Some
things are worth more than that|I would only miss it]."

[The path grew slippery|It was slippery there], and {N} fell flat in a puddle. [Mud was everywhere.|What a splash that
was!] "[Is it all right|Is it hurt]?" asked {F}. {N} [wiped|rubbed] the {O} with {his} sleeve. [Not a scratch!|It was
as good as new.] "[I am glad of that|What luck]," said {N}, [dripping|muddy from head to foot].

A [cheeky|young] magpie [swooped down|came flying] and [snatched|stole] the {O} [right out of {his} hands|from under
{his} arm]. "Stop!" shouted {N}. {F} ran after the bird, {path}, [waving both arms|calling and calling]. [At last|In
the end] the magpie [got tired|began to feel sorry], and dropped the {o} into the soft grass. {N} [picked up|dusted
off] {his} treasure and [thanked|hugged] {F}.

"May I carry the {O} for a bit?" asked {F}. {N} had never [let it out of {his} hands before|let anybody do that]. [But
a friend is a friend.|But {F} asked so nicely.] "[Here you are|Of course]," said {N}, and {F} carried the {o} {path},
as carefully as [an egg|if it were made of sugar].

When they came to the [market|ferry|mill], a crowd of little ones [gathered round|came running]. "[What is that|What
have you got there]?" they [shouted|asked]. {N} showed them the {o} and told them how {he} had got it. [They clapped
their hands.|Their eyes grew round.|Each of them was allowed to touch it once.] "[Come back soon|Come again
tomorrow]!" they called.

They had to crawl through a narrow [tunnel|gap in the hedge]. {N} pushed the {O} ahead of {him}, [inch by inch|bit by
bit], and {F} came [puffing|wriggling] behind. "[I can see daylight|Nearly there]," said {N}. On the other side the
air smelled of {smell}, and the {o} had nothing worse than [a cobweb|a little dust] on it.

The stream had [washed away the bridge|risen in the night]. {N} [lifted|held] the {O} above {his} head and waded in.
The water came up to {his} [chest|chin]. "[Do not let go|Keep it dry]!" called {F}. [One step, another step, and they
were across.|On they went, hand in hand.] {Helper}, who had watched it all, [clapped|cheered] from the bank.
""")

OVERNIGHT: Final[list[Template]] = compile_passages("""
[When it grew dark|When the sun went down], they made a bed of leaves under a {tree}. [The stars came out, one by
one.|An owl called, far away.] "[Are you asleep|Are you still awake]?" whispered {F}. "[Not yet|Nearly]," said {N}.
"[I am thinking of the {O}|I keep thinking of the {o}]." In the morning they [washed in the dew|had {food} for
breakfast] and set out again.

They spent the night in a barn that smelled of {smell}. {Helper} told them a story about [the moon|a giant|the sea],
and {N} fell asleep before the end. {He} dreamed of the {O}, [shining like the sun|floating on the sea|as big as a
house]. [At sunrise|When the cock crowed] {F} shook {him} awake. "[Up you get|Come on], {N}!"

Night fell, and it was [very dark|cold]. {F} was [a little afraid|shivering], so {N} told {fhim} [about {place}|how
{he} had first got the {O}] and held {fhis} hand. [Somewhere there was {sound}.|The wind hummed in the {tree}.] Then
they both slept soundly, and when they woke up, {fair}.
""")

MINIATURES: Final[list[Template]] = compile_passages("""
{Morning} {N} and {F} took the {O} down to the river. They [played {game}|ate {food}] until the sun went down. "[What
a day|That was a good day]," said {F}. {N} [hugged|held] the {O} and smiled, for {he} had never been so {joy}.

{Morning} {N} could not find the {O} anywhere. {He} looked {spot} and {spot2}. "[It is on your back, silly|Look behind
you]!" laughed {F}. And there it was. {N} laughed too, and {he} kept the {O} in plain sight from then on.

{Morning} it [rained and rained|snowed and snowed], and nobody could go out. So {F} came over with {food}, {N} brought
out the {O}, and they [made up stories|sang songs] all day long. "[Let it rain|Let it come down]," said {N}, and {F}
poured them both more {drink}. The {O} had never had such a good time.

"May I borrow it?" asked {F} one day. {N} looked at the {O} and thought it over. "[Let us share it|We can take
turns]," {he} said. So they did, and {F} brought {food} to say thank you. That is how the {O} got [two friends|two
good homes], and {N} was {joy}.

{Morning} {N} fell ill and had to stay in bed. {F} made {food} and [read to {him}|told {him} jokes], and put the {O}
on the pillow where {he} could see it. On the third day {N} was well again. "[It was the soup|It was the {O}]," said
{F}. "It was you," said {N}.

{Morning} {N} and {F} climbed the highest hill with the {O}. {N} {signal}. Far below, somebody waved back. "[Who was
that|Who is it]?" asked {F}. "[A friend we have not met yet|I do not know yet]," said {N}, and took the {O} home
again, feeling {joy}.
""")

# A last sentence for some of the longer stories.
CODAS: Final[list[Template]] = compile_passages("""
The end.

That is [the end of|all there is to tell about] the story of {N} and the {O}.

[And if they have not moved away|And unless something has changed], all three are in {place} still: {N}, {F} and the
{O}.

Good night, {N}. Good night, {F}. Good night, {O}.

[And what became of the {O}?|And the {O}?] {N} has it to this day.

[Whoever does not believe it|If you do not believe it], ask {F} the {FS}, who was there the whole time.

"[Tell it again|Once more, from the beginning]!" the children of {place} say, whenever {N} comes to the end of this
story.

So it was, and {N} the {S} would not have had it otherwise.
""")
