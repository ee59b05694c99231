"""Plots, first half: lost and found, a promise kept, home before the storm, a shared feast."""

from __future__ import annotations

from typing import Final

from training.story_plot import Plot
from training.story_template import compile_passages

LOST: Final = Plot(
    "lost",
    compile_passages("""
{Morning} {N} woke up and the {O} was gone. It was not [under the bed|on its shelf], and it was not [in the
kitchen|behind the door] either. "[I had it yesterday|It was here last night]!" {he} said [with tears in {his}
eyes|again and again]. "[Then it cannot be far|Do not cry]," said {F}. "[We will find it together|I will help you
look]."

{Morning} {N} and {F} came home from {game} {spot}, and only then did {N} notice it: {his} hands were empty. "[My
{o}|The {O}]!" {he} cried. "[I must have dropped it|I have lost it]!" {F} [did not laugh|did not scold]. "[We go back
the way we came|Come, we will search every inch]," said {F}, [and took {his} hand|already on the way].

In the night a [great wind|storm] had blown through {place}, and in the morning the {O} was missing. {N} [ran from
door to door|looked up at every roof], but nobody had seen it. "[The wind went {path}|It blew {path}]," said {F}. "So
that is where we must look." {N} [packed some {snack}|put on {his} boots], and off they went.
"""),
    compile_passages("""
They looked {spot}. [Nothing.|No luck.|All they found was an old boot.] They looked {spot2}. [Nothing there
either.|Only a startled worm.|There was nothing but leaves.] "It is {a_plain_O}," {N} told everyone they met. "[If you
see it, please call me|Please keep your eyes open]."

"[Have you seen|Did you by chance see] {a_plain_O}?" {N} asked {helper}. {The_helper} [thought hard|put down {hhis}
work]. "[Something of the kind|Something like that] went past me [this morning|not long ago], {path}." "[Thank you|Oh,
thank you]!" cried {N}, and {he} [ran so fast that {F} could hardly keep up|set off at a run, with {F} behind {him}].

Something [{adj} was gleaming|was shining] {spot}. {N}'s heart [leapt|beat faster]. {He} [ran|rushed] towards it, but
it was only [a tin can|an old bottle|a puddle with the sun in it]. {N} sat down and [hid {his} face|sighed]. "[That
was not the end of it|Every wrong place is one place less]," said {F}. "[On we go|Up with you]."

{F} had an idea. {Fhe} drew a picture of the {O} on a [piece of bark|big leaf], and underneath {fhe} wrote: "LOST!
Please bring it to {N} the {S}." [They nailed it to a {tree}.|They hung it up {spot}.] At the bottom {F} added a
{emoji}, because [that makes people kind|it looked nicer]. {Helper} read it twice and promised to [ask around|tell
everyone].
"""),
    compile_passages("""
Then, {spot}, {N} saw it. There it lay, [half hidden by {flower}|under a big leaf|among the {flower}]: the {O}! {He}
[gave a shout|jumped for joy] and [picked it up|held it close]. {F} [danced in a circle|threw both arms in the air].
"[I told you so|We found it], {N}, we found it!"

"[Are you looking for this|Is this yours]?" said a [small|shy] voice. It was {helper}, and in front of {hhim} lay the
{O}. "[I found it {spot}|It fell right at my feet]. I have been taking good care of it." {N} could hardly speak.
"[Thank you|Thank you a thousand times]," {he} said at last, and {F} [shook {hhim} by the hand|gave {hhim} the last of
the {snack}].

[High up in|In the very top of] a {tree} there hung something {adj}. "[There it is|My {o}]!" cried {N}. {F} [climbed
onto {his} shoulders|held the trunk], and {N} [reached up|stretched] as far as {he} could. A little more, a little
more, and the {O} [dropped into {his} arms|came tumbling down]. [They both fell over into the {flower}.|It was not
even dusty.]

"[Look|Look there], {N}!" {F} [whispered|said, very softly]. In a nest of moss and straw {spot} lay four tiny eggs,
and over them, like a roof, the {O}. {N} [waited|would not touch it]. Only when the chicks had hatched and
[flown|waved goodbye] did {he} take the {o} [home|back]. "[They needed it more than I did|It was in good hands]," said
{N}.
"""),
    compile_passages("""
That evening {N} put the {O} back [in its place|where it belonged] and [looked at it for a long time|said good night
to it]. "[A thing can get lost|You can lose a thing]," {he} said to {F}, "but [a friend like you is for always|never a
friend who helps you look]."

So {N} the {S} and {F} the {FS} went home to {place}, [tired but {joy}|arm in arm], and {N} never let go of the {O}
all the way.

From that day on {N} [tied a string to|kept a label on] the {O}. "[Now it can never get lost again|Just to be safe],"
said {he}. {F} laughed. "[And if it does|If it does], we will go and find it. [We are good at that now.|We know how.]"

"[How shall I ever thank you|What can I give you], {F}?" asked {N}, with the {O} [safe in {his} arms|held tight].
"[With {food}|Some {food} would be nice]," said {F}. And that is just what they had, the two of them, with the {O} on
the table between them.
"""),
    carried=False,
)

PROMISE: Final = Plot(
    "promise",
    compile_passages("""
{Morning} {helper} knocked at {N}'s door. "[My little one is ill|There is a sick child in my house], and nothing makes
the poor thing smile. Would you bring your {O} [before the sun goes down|by this evening]?" "[I promise|You have my
word]," said {N}. {F} [wanted to come along|came along], for [a promise is easier to keep in twos|the way was long].

{N} had made a promise. [Last winter|Long ago] {he} had told {his} grandmother: "[When the cherries are ripe|On your
birthday] I will come and bring the {O}, so that you can see it [once more|again]." Now the day had come. "[It is
far|It is a long walk]," said {F}. "A promise is a promise," said {N}. So they set out {path}.

"[Will you come to the lighthouse|Will you visit me on my hill]?" {N}'s [uncle|aunt] had written. "[And bring the
{O}|And do not forget the {O}]. I have told everyone about it." {N} had written back a single word, yes, and drawn a
{emoji} beside it. So {morning} {he} [put on {his} boots|packed some {snack}], and {F} came to share the walk.
"""),
    compile_passages("""
"[Come and play {game}|Stay and play {game} with us]!" called [a band of|some] children {spot}. {N} [would have loved
to|wanted to, very much]. {He} looked at the sun, which [was sinking|would not wait]. "[Another day|Tomorrow]," {he}
said. "[I have given my word|Somebody is waiting for me and the {O}]." {F} [sighed a little|was proud of {him}], and
they went on.

"Why not turn back?" said {helper}. "[It is such a long way|Nobody would blame you]." {N} looked at {his} tired feet
and then at the {O}. "[I would know it|I would blame myself]," {he} said. {The_helper} [said nothing for a while|was
silent], and then {hhe} [showed them a short cut {path}|gave them {snack} for the journey].

{F} counted the milestones. "[Five more|Seven more], and then we are there." "[You said that an hour ago|You always
say that]," said {N}. [They both laughed.|They looked at each other and giggled.] [To pass the time|To make the road
shorter], {N} told {F} how {he} had come to make the promise, and {he} [told it so well|took so long over it] that
they [forgot their sore feet|were there before {he} had finished].

A [thick|grey] fog lay over the fields. "[I cannot see my own nose.|Where are you?]" said {F}. {N} [thought
quickly|had an idea]. {He} {signal}. [Somewhere ahead, a dog barked, and they walked towards it.|A kind voice
answered, "This way!"] So they got through, {path}, one careful step after another.
"""),
    compile_passages("""
The sun was [touching the hills|almost gone] when they [came to the gate|saw the house]. {N} ran the last stretch.
"[Here I am|I am here], and here is the {O}!" [The door flew open.|A light came on.] There was [a cry of joy|a smile
as wide as the sky]. {N} {signal}, and everybody [came out to see|clapped].

"You came!" said a voice from the [window|doorway]. "[I always come when I say so|I promised]," said {N}, out of
breath. {He} [laid the {O} down gently|held out the {O}] for all to see. [For a moment nobody spoke.|It grew very
quiet.] Then somebody [laughed for joy|began to clap], and {F} [wiped away a tear|did a little dance].

The gate was locked, and nobody heard them knock. "[And now|What now]?" [asked|sighed] {F}. {N} [walked round the
house|took a step back] and {signal}. A window flew open. "[I knew you would come|Is it you? Is it really you]!"
somebody called down, laughing and crying at once, and [the key|a rope of sheets] came down to let them in, the {O}
first of all.
"""),
    compile_passages("""
[Late that night|On the way home] {F} said, "[You could have stayed at home.|It was hard, was it not?]" {N} looked
down at the {O}. "[It would have been heavier to carry a broken promise|Yes, and I am {joy} that we went]," said {N}.

And ever since, when someone in {place} gives their word, they say: "I promise it like {N} the {S}." Then {N}
[blushes|looks at {his} feet], {F} [winks|smiles], and the {O} [lies in the sun, as {adj} as ever|has its place of
honour].

So {N} kept {his} word, and {F} had helped {him} keep it. [They slept late the next day|They went home under the
stars], with the {O} between them. [A promise kept makes a soft pillow.|]

"[Next time|Next year] we will do it again," said {N}, and {F} agreed. Then {he} took the {O} in {his} arms, and the
two friends [walked home under the first stars|went home to {place}, singing].
"""),
    overnight=False,
)

STORM: Final = Plot(
    "storm",
    compile_passages("""
{Morning} {N} and {F} had walked a long way from {place}, with the {O}, of course. Then {F} [pointed at|looked up at]
the sky. In the west stood a wall of dark clouds. "[A storm is coming|That is a storm]," said {F}. "[We must be home
before it breaks|Home, and quickly]!" {N} [took the {O} under {his} arm|held the {O} tight], and they hurried {path}.

"[Stay close today|Do not go far]," {N}'s mother had said {morning}, "[for my knee is aching, and that means a
storm|for the swallows are flying low]." But {N} and {F} had [followed a butterfly|gone to pick {flower}], and had
taken the {O} along, and now they were far from {place}, and the wind was [rising|getting up]. "[Let us go home|We had
better run]," said {N}.

They had been visiting {F}'s cousin beyond the hills, and {N} had brought the {O} to show it. On the way back the wind
turned, and the sky grew as dark as slate. "[How far is it|How long to {place}]?" asked {N}. "[Two hours|Three hills
and a river]," said {F}. [Thunder rumbled, far away.|The first leaves were flying.] {N} buttoned {his} coat over the
{O}, and they began to walk fast.
"""),
    compile_passages("""
The wind [blew harder|howled] and the trees [bent|groaned]. {N} [leaned|walked] against it with the {O} [held to {his}
chest|under {his} coat]. "[Take my hand|Hold on to me]!" shouted {F}. They [went on like that|struggled] {path}, one
small step at a time. [A branch came down behind them.|A gate flew by like a bird.]

{Helper} stood {spot}, [not knowing where to go|shaking with fear]. "[Come with us|Come along]," said {N}. "[There is
room for three at my house|Nobody should be out in this]." {The_helper} [did not wait to be asked twice|nodded
gratefully]. "[You take care of that {o}|Mind your {O}]," {hhe} said, "and I will [watch the path|keep the wind off
you]." So now they were three.

[Lightning|A flash] lit up the whole sky. {F} [counted|began to count]: "One, two, three, four..." Then the thunder
[rolled|crashed]. "[It is four miles away|It is coming nearer]," said {N}. {He} patted the {O}, [as if it were the one
that was afraid|to give {himself} courage]. "[Do not be afraid|We will make it]," {he} [told it|said], and they ran
{path}.

The path [was gone|had turned into a brook]. "[We are lost!|Which way now?]" cried {F}. {N} [shut {his} eyes to
think|turned round and round]. Then {he} caught a whiff of warm bread. "[I know where we are|This way]!" {he} said.
"[That is the bakery|The wind is blowing from {place}]." With the {O} [safe and dry|in front], they went {path}.
"""),
    compile_passages("""
[At last|There, at last], through the rain, they saw the lights of {place}. "[Run|One last run]!" called {N}. [They
splashed through the puddles|They flew down the lane], the door banged shut behind them, and at that very moment the
storm broke [over the roof|with all its might]. {N} unwrapped the {O}. It was [dry as a bone|hardly wet].

It was so dark that they could not see [the village|their own feet]. Then {N} stopped and {signal}. [They waited.|They
held their breath.] A light appeared, and another. "[Here|Over here]!" called the neighbours of {place}, who had been
[searching for them|waiting at the gate]. [A minute later they were all inside, and the storm could do as it liked.|So
they were brought home, just in time.]

The bridge to {place} was [shaking|groaning] in the wind. "[You first|After you]," said {N}. "[Together|Both at
once]," said {F}. With the {O} between them they ran, and behind them, plank after plank, the bridge fell into the
[foaming|roaring] river. Then the door of {N}'s house closed behind them, and it was [warm|quiet and warm] at last.
"""),
    compile_passages("""
{N} and {F} sat by the fire with {drink} and listened to the [rain|thunder]. The {O} hung [over the stove|by the fire]
to dry. "[I like a storm best from indoors," said {N}. "So do I, and so does your {o}," said {F}.|It is a fine storm,
from in here," said {N}. "The finest I ever ran away from," said {F}.]

[In the morning|The next day] the sky was [washed clean|as blue as could be]. {N} opened the door, looked at the {O}
and then at {F}. "[Shall we go for a walk|Where shall we go today]?" asked {N}. "[Not too far|Only as far as the
garden]," said {F}, and they both laughed.

"[Home is never so lovely|There is no place like home]," said {N} the {S}, wrapped up in [wool|a thick towel], with
the {O} in {his} lap. {F} was already asleep. [Outside the storm roared, but it did not matter at all.|]

They told the story for years in {place}: how {N} and {F} ran a race with a storm and won, and how the {O} [came home
without a scratch|was the first thing in the door].
"""),
    leisure=False,
    overnight=False,
)

FEAST: Final = Plot(
    "feast",
    compile_passages("""
{Morning} {N} [opened the cupboard|looked into the pantry], and there was hardly anything in it. {F}'s was just as
empty. "[Winter was long for everyone|It is the same all over {place}]," said {F}. {N} looked at the {O} for a while.
"[If everybody brings a little|A little and a little], that makes a feast," {he} said. "[Let us go and invite them|Let
us ask the neighbours]!"

"[Tomorrow is the harvest moon|It is midsummer tomorrow]," said {F}, "and nobody has thought of a feast!" "[Then we
must do it|We will do it]," said {N}. "[I will bring the {O} for luck|The {O} shall have a place on the table], and we
will go from door to door until there is something to eat for everyone." [They wrote a list, and {F} drew a {emoji} at
the top.|They began at once.]

{Morning} {N} found {himself} with a whole [pot|tray] of {food}, far too much for one {S}. "[Let us share it|We could
have a feast]," said {F}. "[With everybody|With all of {place}]!" said {N}. {He} took the {O} along to [call the
guests together|show the way], and they set off {path}.
"""),
    compile_passages("""
The first door belonged to {helper}. "A feast?" said {the_helper}. "[I have only {food}|All I have is {food}]." "[That
is just what we need|Nobody else has that]," said {N}. {The_helper} [beamed|put on {hhis} best coat]. "[Then I am
coming|I shall bring it], and may I sit [next to|near] the {O}?"

[Behind|At] the next door there was only a sad voice. "[I have nothing to bring|My shelves are bare]," said {helper}.
"You can [sing|tell a story]," said {F}. "[We need that as much as {food}|A feast needs that, too]." "[Do you mean
it|Truly]?" asked {the_helper}. "[Of course|Every word]," said {N}. "The {O} and I [will listen|will clap the
loudest]."

They [gathered|picked] {flower} {spot}, enough to cover a table. {F} [sneezed|got stung by a nettle], and {N} found a
[patch|bush] of late raspberries. "[One for the feast, one for me|These are for later]," said {N}, with red juice on
{his} chin. {He} laid a wreath around the {o}, and it [looked splendid|had never looked so fine].

"[Who will cook all this|Who will stir the pot]?" asked {F}. "[I can make {food}|I know how to make {food}]," said
{N}, "but not for so many." {Helper} put {hhis} head around the door. "[Did somebody say {food2}?|I could not help
hearing you.]" {hhe} said. "[Give me a spoon|Move over]!" Soon the kitchen was full of steam and laughter, and the {O}
[hung safely on its nail|had to be moved to the windowsill].
"""),
    compile_passages("""
When the tables stood ready, {N} {signal}. From [all sides|every lane] they came, the young and the old, each with a
dish. They had {food}, they had {food2}, and they had {drink} for all. [{Helper} played a waltz.|Somebody began to
sing.] And in the middle of the longest table, among the {flower}, was the {O}.

The moon rose, and [a hundred candles|the candles] were lit. "[Is there enough|Will it be enough]?" whispered {F}. {N}
looked along the tables. Everyone had brought so little, and there was so much: {food}, {food2}, {food3}. "[Three
cheers for {N}|A toast to {N} and {F}]!" called {helper}. {N} turned [pink|red] and held up the {O}, and the whole of
{place} cheered.

They had [just sat down|hardly begun] when {rain}. "[Oh no, the tables|The feast]!" cried {F}. {N} [jumped up|did not
hesitate] and {signal}. "[Everybody into the barn|Take a table, everyone]!" {he} called, and the whole of {place}
lifted and carried. In the barn it was crowded and warm, and the {food} [went round|was passed] from lap to lap, with
{drink} after it.
"""),
    compile_passages("""
[When the last guest had gone home|Long after midnight], {N} and {F} sat on the doorstep with the {O}. "[Yesterday we
had nothing|This morning the shelves were empty]," said {F}. "[We had everything, but in different houses|It was only
spread over too many houses]," said {N}.

They danced until the [candles burned low|cock crowed], and {N} danced with the {O} on {his} arm. "[Same time next
year|Every year from now on]?" asked {F}. "[Every year|Yes]," said {N} the {S}.

And so it became a custom in {place}. Once a year {N} brings out the {O}, {F} writes the list, and nobody [stays
hungry|stays alone]. [There is always a place left at the table for you, too.|]

{N} was too full to move. "[That was the best feast in the world|I could not eat another crumb]," {he} said, and laid
{his} head down beside the {O}. {F} [covered {him} with a coat|put out the last candle] and [tiptoed home|sat down
next to {him}].
"""),
    journey=False,
    overnight=False,
)

PLOTS: Final[tuple[Plot, ...]] = (LOST, PROMISE, STORM, FEAST)
