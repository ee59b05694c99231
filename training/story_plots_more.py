"""Plots, second half: a contest, a new friend, something broken and mended, a rescue."""

from __future__ import annotations

from typing import Final

from training.story_plot import Plot
from training.story_template import compile_passages

CONTEST: Final = Plot(
    "contest",
    compile_passages("""
{Morning} a notice hung on the {tree} in the square of {place}: "GRAND CONTEST! Who can [amaze|delight] us most? First
prize: a year of {food}." "[You must enter|That is something for you], {N}, with your {O}!" said {F}. "[Me? Never|I
would not dare]," said {N}. But that night {he} [could not sleep|lay awake], and in the morning {he} had [made up
{his} mind|said yes].

Every year {place} holds a [great|grand] contest, and every year {N} had only watched. "[Not this time|This year you
take part]," said {F}. "[You have the {O}|Nobody else has {a_plain_O}], and you have me." {N} [swallowed hard|turned
pale]. "[What if they laugh|And if I come last]?" {he} asked. "Then we laugh, too," said {F}.

"[I shall win the contest|Nobody can beat me]," boasted {helper}, loud enough for the whole of {place} to hear. {N}
said nothing, but {he} [went home and took out|looked at] the {O}. "[We could try, too.|Why not us?]" {he} said to
{F}. "[There is a week left|We have five days]," said {F}. "[Let us begin|Time to practise]!"
"""),
    compile_passages("""
They practised {spot}, where nobody could see. {N} {signal}. "[Once more|Again]!" said {F}. {N} tried again, and
[tripped over {his} own feet|got the hiccups]. {F} [bit {fhis} lip so as not to laugh|helped {him} up]. "[That was
much better|The beginning was perfect]," {fhe} said, and after the tenth time it [really was|was almost true].

"[You call that practice|Is that all you can do]?" [sneered|laughed] {helper}, leaning on the fence. "[With such a
{o}|With that old {o}] you will come last." {N} felt [{his} ears grow hot|a lump in {his} throat]. {F} [stood up very
straight|stepped in front of {him}]. "[We shall see|Wait until Saturday]," said {F}. "[Come, {N}|Never mind, {N}].
From the top."

On the eve of the contest {N} could not eat a bite, not even {food}. "[My knees are shaking|There are butterflies in
my stomach]," {he} said. "Shall I tell you a secret?" said {F}. "[Everyone's are|Mine are, too, and I do not even have
to go on]." Together they [polished|looked over] the {O} one last time.

{Helper} came by with a good word. "I entered that contest once, long ago," said {the_helper}. "[I came last|I forgot
everything]. [And it was the best day of my life|And do you know what? Nothing bad happened]." "[Really|Truly]?" asked
{N}. "[Do it for the fun of it|Look at your friend, not at the crowd], and let the {O} do the rest."
"""),
    compile_passages("""
[The great day came.|Then it was time.] The whole of {place} was there. First came {helper}, who juggled [five
plums|seven eggs] and dropped only one. Then they called for {N}. {He} [walked out|climbed onto the stage], looked for
{F} in the crowd, and {signal}. [It was so quiet that you could hear the bees.|People forgot to breathe.] Then the
clapping began, and [it did not stop|it grew and grew].

"Number seven: {N} the {S}!" {N} stepped forward on [shaky legs|tiptoe]. Halfway through, {helper} in the first row
[sneezed|fell off the bench], and {N} forgot what came next. "[The {o}|Now the {o}]!" called {F}. Of course! {N} took
a deep breath and {signal}. [The crowd roared.|Caps flew into the air.] "[Bravo|Encore]!" they called.

{N} had waited [so long|all day] that {he} was the very last. By then half the crowd [had gone home|was yawning]. "[Go
on|Now or never]," said {F}. {N} shut {his} eyes and {signal}. Someone turned round, and someone else came back. When
{N} opened {his} eyes again the square was full, and [even the judges were on their feet|a judge was crying into his
beard].
"""),
    compile_passages("""
{N} did not win first prize. It went to {helper}, who [shared it with everyone|had earned it]. But the
[youngest|smallest] child in {place} came up to touch the {O}, and said, "[I liked you best|Yours was the nicest]."
"[That is better than a year of {food}|That is my prize]," said {N} to {F}, and {he} meant it.

And the winner was {N}! {He} [stood there with an open mouth|could not believe it]. "[Half of the prize is yours|We
won it together]," {he} told {F}, "for [I would never have dared|I would have run away] without you." They carried the
{O} home through the streets of {place} [on their shoulders|like a king].

[Later|That evening], when the square was empty, {N} and {F} sat on the edge of the stage with the {O}. "[Were you
afraid|How was it]?" asked {F}. "[Terribly|Until I saw you]," said {N}. "[Shall we do it again next year|When is the
next one]?" [They laughed until the stars came out.|]

They came second, {N} the {S} and {his} {O}, and {F} hung the little prize card, which had a {emoji} on it, over the
door. Whenever {N} [feels|felt] small, {he} [looks|looked] at it.
"""),
    journey=False,
    overnight=False,
)

NEW_FRIEND: Final = Plot(
    "new friend",
    compile_passages("""
[At first|For three days] neither of them said a word. {N} looked at {F}, and {F} looked at {N}. Then the {O} [slipped
out of {his} hands and landed at {F}'s feet|fell over the fence]. {F} picked it up. "[Is this yours|Did you lose
this]?" {fhe} asked. "[Yes|It is]," said {N}, very quietly. "It is beautiful," said {F}. [And so it began.|That was
the beginning.]

{N} [practised in front of the wall|said it over and over]: "Good morning, I am {N}, would you like to play?" But when
{he} stood at {F}'s door with the {O}, all {he} could say was: "[Hm|Um]." {F} [did not mind|smiled]. "Hm," said {F},
too. "[I am {F}. Is that {a_plain_O}?|What a wonderful {o}!] [Come in|Do come in]!"

"{hello}!" called {F}, when {fhe} saw {N}. {N} did not understand. {F} [laughed|smiled]. "[That is {tongue}|It means
hello in {tongue}]. [We spoke it where I used to live|My grandmother taught me]." "{hello}," said {N} slowly, and
showed {fhim} the {O}. [Some things need no words at all.|{F} clapped.]
"""),
    compile_passages("""
{N} showed {F} [everything|all the best places] in {place}: {path}, where the {flower} grow, and {spot}, where it
smells of {smell}. "[And here|This is where] I always sit with the {O}," {he} said. "[Always alone|All by yourself]?"
asked {F}. {N} nodded. "[There is room for two|Not any more]," said {F}, and sat down.

One day they [quarrelled|had a quarrel]. {F} had [made fun of the {O}|sat on the {O} by mistake], and {N} had said
something [unkind|horrid]. {N} went home and [slammed the door|pulled the covers over {his} head]. But it was [too
quiet|dull]. {He} made {food} and went next door. "[I am sorry|Forgive me]," {he} said. "[So am I|I am sorry, too],"
said {F}. "[What is that I smell|Is that {food}]?"

"[I miss my old home|I am homesick]," said {F}, and {fhis} eyes grew wet. {N} [thought for a moment|did not know what
to say]. Then {he} put the {O} into {F}'s hands. "[It always helps me|You may hold it until you feel better]," said
{N}. {F} told {him} about [the sea|the mountains|the big city] and [the house with the tiled stove|an old friend
there], and afterwards {fhe} felt {joy}.

{F} taught {N} to say thank you in {tongue}: "{thanks}!" "{thanks}!" said {N}, and [tried it out on|used it to greet]
{helper}. "[Bless you|Gesundheit]," said {the_helper}, who thought it was a sneeze. {F} laughed so hard that {fhe} had
to hold on to the {O}.
"""),
    compile_passages("""
Then {N} heard that {F} might have to move away again. {He} [could not eat|did not sleep at all]. {He} took the {O} to
{F}'s door. "[I want you to have it|Take it with you], so that you do not forget me," {he} said. {F} looked at the
{O}, and then {fhe} shook {fhis} head. "[Keep it|It is yours]. We are not going anywhere. [My mother just told me|It
is all settled]. We are staying in {place}!"

On {N}'s birthday nobody seemed to remember. {He} sat with the {O} {spot} and felt {worry}. Then {he} heard {sound},
and out jumped {F}, with {snack}, and behind {fhim} the whole of {place}. "[Happy birthday|Surprise], {N}!" they
called. "[How did they all know|Who told them]?" asked {N}. "[I knocked on every door|I am new here]," said {F}.
"[That is a good way to meet people|I had to ask everyone's name anyway]."

One night there was {sound}, and {F}'s voice, very small: "[Help|Is anybody there]?" {N} [did not stop to put on
shoes|ran out in {his} nightshirt]. {F} had [climbed the {tree}|fallen into the ditch] in the dark and could not get
[back|out]. {N} {signal}, until the neighbours [woke up|came running] with a ladder. "[You came|You heard me]," said
{F}, and held on to {N} and the {o} [all the way home|for a long time].
"""),
    compile_passages("""
[Since then|Ever since] there has been a hole in the hedge between the two houses, just wide enough for {a_S}, {a_FS}
and {a_plain_O}. {N} goes through it every morning, and {F} [comes back|returns] with {him} every evening.

"[Once I had only the {O}|I used to have one treasure, my {o}]," said {N}. "[Now I have two treasures|Now I have you
as well]." "[And I have a friend|I am no {o}]," said {F}, but {fhe} was very {joy}. And the {O} lay between them in
the grass, [as if it were listening|and said nothing, as usual].

That is how {N} the {S} and {F} the {FS} became friends. [If you hear laughter in {place}, it is theirs.|] The {O}
belongs to {N}, as it always did, but [they share it|on Sundays {F} may take it home].

In the evening {N} wrote in {his} diary: "Today I played with {F}. Tomorrow, too." Then {he} [drew a {emoji}|drew a
little heart] underneath, put the {O} beside {his} pillow and [fell asleep, smiling|blew out the light].
"""),
    journey=False,
    overnight=False,
)

BROKEN: Final = Plot(
    "broken",
    compile_passages("""
It happened {morning}. {N} [tripped on the stairs|slipped on the ice|turned round too fast], there was an ugly sound,
and the {O} {broke}. {N} stared at it. There was {crack}, right through the middle. "[It is ruined|It is all over],"
{he} whispered. "[Broken is not the same as gone|It can be mended]," said {F}. "[Somebody must know how|Let us find
somebody who knows how]."

"I only wanted to [hold it|look at it]," said {F} in a very small voice. [At {fhis} feet|On the floor] lay the {O},
with {crack} in it. {N} wanted to be angry, but {F} looked so {worry} that {he} could not. "[It was an accident|You
did not mean to]," said {N}. "[Come|Dry your eyes]. They say that beyond the hills there lives a mender who can mend
anything."

{Morning} {N} took the {O} out of its wrappings and gave a cry. It {broke} as {he} lifted it, just like that, for it
was [very old|worn thin]. "Can you {mend} it?" {he} asked {F}. "[Not I|I would only make it worse]," said {F}, "but
there is a mender [in the next valley|across the river]. [We will go together|Pack your bag]."
"""),
    compile_passages("""
They asked {helper} for help. {The_helper} turned the {O} this way and that. "[Hm|Oh dear]. That is {crack}. [I can
mend a roof, but not this|This needs finer fingers than mine]. Go {path} and ask again." {N} wrapped it in [soft
moss|a woollen sock], and they went on.

"[Throw it away|Buy a new one]," said {helper}. "[There are plenty of others|At the market they have them by the
dozen]." "[Not one like this|But this one is mine]," said {N}. "[It has been everywhere with me|It knows me]."
{The_helper} looked at the broken {o} for a long while. "[I had something like that once|You are right]," {hhe} said
softly. "[Try the mender, {path}|You will find the mender {path}]. Good luck!"

"[We need|The mender will need] {glue}," said {F}. They [searched|looked] {spot} and {spot2}, and they asked {helper},
who had [just that|some to spare]. "[What do I owe you|What does it cost]?" asked {N}. "[A song," said {the_helper}.
So they sang all the verses of {song}.|Come and tell me how it ends," said {the_helper}. {N} promised to do so, and
put it all into {his} bag beside the broken {o}.]

{F} was very quiet. "[What is it|Are you tired]?" asked {N}. "[I keep thinking of the {O}|I wish it had not
happened]," said {F}. {N} [stopped|stood still]. "[Listen|Look at me]. A thing is a thing, and you are my friend.
[Even if nobody can mend it|Whatever the mender says], that stays whole."
"""),
    compile_passages("""
The mender turned out to be {helper}, in a workshop full of [springs and spoons|string and sawdust]. "[Let me see|Put
it here under the lamp]," said {the_helper}. {Hhe} took {glue}, and [hummed|did not say a word] for an hour. Then the
{O} was {mended}. "[There|Done]," {hhe} said. "[You can see the scar, but it will hold|It is stronger now than it was
before]."

But the mender's door was shut. "[Gone to the sea|Back in a month]," said a note, with a {emoji} on it. {N} [sank down
on the step|could have cried]. "[Then we do it ourselves|We have watched and asked all the way here]," said {F}. They
took {glue}, and {F} held the two sides together while {N} worked. [It took all day.|They hardly dared to breathe.]
And look, the {O} was {mended}, and it held!

"[Who sent you to me|How did you find me]?" asked the mender, who was {helper}. "[Everyone|Half the country]," said
{N}. {The_helper} had {glue} and a great deal of patience. "[Hold this|Keep still]," {hhe} told {F}, "and you, {N}, do
the last bit yourself. [Then you will know how|It is yours, after all]." {N} did it with {his} tongue between {his}
teeth, and the {O} was {mended}.
"""),
    compile_passages("""
Where {crack} had been, there was now a thin bright line. "[It is more beautiful than before|I like it even better
now]," said {N}, holding the {O} up to the sun. "[It has a story now|Now it can tell a story]," said {F}.

{N} carried the {O} home to {place}, and when anyone asked about the mark, {he} said, "[That is where my friend {F}
helped me|That is the place where it is strongest. Ask {F}]."

From then on {N} and {F} were the menders of {place}. A chair, a clasp, a quarrel: [nothing was too difficult|they
mended everything]. And over their door, for all to see, hung the {O}.

"[Thank you for not being angry," said|Are you still sad?" asked] {F} on the way back. {N} looked at the {mended} {o},
{adj} and whole in {his} hands. "Friends mend," {he} said, and {he} let {F} carry the {O} the rest of the way.
"""),
    carried=False,
)

RESCUE: Final = Plot(
    "rescue",
    compile_passages("""
{Morning} {N} and {F} were out with the {O} when they heard {sound}. "Help! Help!" It came from far away, [across the
lake|beyond the hill]. "[Somebody is in trouble|That is a child's voice]," said {F}. {N} [tucked the {O} under {his}
arm|took the {O} in both hands]. "[Then we must go|Let us hurry]," {he} said, and they set off {path}.

[A pigeon brought|The wind blew] a note to {N}'s window. "I am stuck on the mountain and cannot get down," it said.
"Please come!" There was no name, only a {emoji}. {N} showed it to {F}. "[It may be dangerous|We are only small],"
said {F}. "[So is whoever wrote this|Then we will be careful]," said {N}. {He} packed {snack} and the {O}, and off
they went.

The ferry had not come back to {place}. [All night|Since yesterday] {helper} had stood on the shore and waited. "[My
children are on that boat.|Will nobody go and look?]" {hhe} said. "[We will|{F} and I will go]," said {N}. "[And take
the {O} with you|Take your {O}]," said {F}. "[You never know|It has brought us luck before]." So they went, {path}.
"""),
    compile_passages("""
"[Hello! Can you hear us|Where are you]?" called {N}. They [listened|waited]. There was only {sound}. Then {N}
{signal}. [Again they listened.|They waited once more.] And now, thin and far away, there came an answer. "[Over
there|That way]!" cried {F}, and they ran {path}.

{Helper} barred the way. "[Nobody goes up there|It is too dangerous for you two]," said {the_helper}. "[But somebody
needs help|Somebody is waiting for us]," said {N}, and held the {O} tight. {The_helper} looked from one to the other.
"[Then take this rope|In that case, take my stick]," {hhe} said gruffly. "[And come back safe|And mind the loose
stones]."

[The rocks were steep.|It was a hard climb.] {N} went first and reached down for {F}, and then {F} went first and
reached down for {N}. "[Do not look down|Look only at me]," said {F}. The {O} [hung on {N}'s back|was tied to {N}'s
back]. [A stone came loose and fell for a long, long time.|Far below lay {place}, tiny and still.]

They found a [small footprint|torn mitten|trail of crumbs] {spot}. "[We are close|We are on the right track]," said
{F}. {N} knelt down. "[It leads|They go] {path}," {he} said. {He} [polished|touched] the {O} for luck, and they
followed the trail until {rain} and [washed it away|hid it]. "[I know the way now|No matter]," said {N}. "[Straight
on|Follow me]!"
"""),
    compile_passages("""
And there, {spot}, sat a [tiny calf|little goat|small gull], [shaking with cold|wet through]. "[You came|I thought
nobody would come]!" it sobbed. But how to get it [home|down]? {N} thought of the {O}. {He} {signal}. Down in {place}
[they saw it|they noticed], and soon [the strong old ox|half the village] came with ropes and warm coats, and all was
well.

They were nearly there when a [rockslide|flood] cut off the way back. "[Now we are the ones who need help.|What do we
do?]" said {F}. "[Now it is the turn of the {O}|I know]," said {N}. {He} climbed onto a boulder and {signal}. [They
counted to a hundred.|It seemed like hours.] Then there came a shout, and {helper} threw them a line. One after the
other, the lost [child|little one] first, they were pulled to safety.

At the end of the path [there was a deep hole|gaped a dark pit], and from the bottom two eyes looked up. "[Are you
hurt|Can you climb]?" called {F}. "[A little|No]," came the answer. {N} {signal}, to let the little one know [where
they were|that help had come]. Then {F} lay flat on the ground, {N} held {F} by the feet, and [one, two, three|with a
pull and a heave], up came a very muddy [little goat|baby stork].
"""),
    compile_passages("""
In {place} they wanted to put up a statue of {N} the {S}. "[Oh no|Please do not]," said {N}. "[I was not alone|It was
{F}, and it was the {O}, and a bit of luck]." So they [had {food} instead|planted a {tree} instead], and {F} and {N}
sat in its shade with the {O}.

The little one gave {N} a kiss, and {F} got one, too. "[And one for the {o}!|What about the {o}?]" said {F}. So the
{O} got the third kiss, [and {F} swore that it blushed|and then they all went home].

"[Were you not afraid|Weren't you scared]?" asked {F} that evening. "[The whole time|Very much]," said {N}, and rubbed
a smear of mud off the {O}. "[But I was afraid with you, and that is only half as bad|But somebody had to be brave, so
we both were]."

Ever since that day the {O} has hung by the gate of {place}. Whoever is in need may use it, and {N} and {F} will come.
[Nobody who called has waited long.|]
"""),
)

PLOTS: Final[tuple[Plot, ...]] = (CONTEST, NEW_FRIEND, BROKEN, RESCUE)
