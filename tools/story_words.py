"""The word lists of the story grammar.

Three lists are *reserved*: `NAMES`, `SPECIES` and (in `story_objects`) the object nouns. Their words occur in a story only in
the role of the protagonist, the friend and the treasured object, so that a checker can tell from the text alone when a
generated story has swapped one of them for another.
"""

from __future__ import annotations

from typing import Final

# Name -> subject pronoun. No name is also an English word, so every occurrence is a name.
_SHE = """Pippa Mina Zoë Chloé Nora Tilda Ida Greta Freya Elsie Mabel Inés Åsa Renée Maja Lotte Dora Wilma Nell Tess
Anouk Suki Yuki Amara Leila Priya Rosa Clara Sofia Hanna Zelda Petra Vera Emmy Kiki Lulu Nadia Thea Willa Bibi Olga"""
_HE = """Pip Milo José André Noël Björn Søren Otto Hugo Felix Oscar Rufus Barnaby Jasper Theo Finn Leo Toby Kofi Ravi
Amir Kenji Tomás Jonah Casper Gus Ned Alfie Bruno Diego Emil Igor Lars Mateo Nico Samir Tariq Victor Zeno Ivo Hamish"""
NAMES: Final[dict[str, str]] = dict.fromkeys(_SHE.split(), "she") | dict.fromkeys(_HE.split(), "he")

PRONOUNS: Final[dict[str, tuple[str, str, str, str]]] = {  # subject -> subject, object, possessive, reflexive
    "she": ("she", "her", "her", "herself"),
    "he": ("he", "him", "his", "himself"),
}

SPECIES: Final[tuple[str, ...]] = tuple(
    """fox rabbit hedgehog mouse squirrel badger otter mole frog duck kitten beaver fawn lamb piglet raccoon panda koala
    penguin sparrow hamster gosling turtle pony lizard dormouse chipmunk puppy ferret wombat""".split()
)

ADJECTIVES: Final[tuple[str, ...]] = tuple(
    """red blue green yellow golden silver purple orange white black pink brown crimson turquoise violet striped
    speckled scarlet""".split()
)

SIZES: Final[tuple[str, ...]] = ("small", "little", "fine", "tiny", "lovely", "old", "neat", "pretty", "well-loved")

PLACES: Final[tuple[str, ...]] = tuple(
    """Willowbrook Fernhollow Mossbury Appledale Cloverfield Thistledown Maplewick Pebbleford Bramblewood Larkmeadow
    Honeyhill Birchwater Elderglen Foxglove-on-Sea Saltmarsh Hazelbank Winterbourne Juniper-Vale Puddlewick Quillstead
    Stonebridge Tumbledown Oakenshaw Violet-Bay Windlemere Saint-Rémy Østerby Plumstead Rookhaven Silverbeck""".split()
)

HOMES: Final[tuple[str, ...]] = (
    "in a snug burrow",
    "in a hollow oak",
    "in a cottage with a crooked chimney",
    "in a little house on stilts",
    "under the roots of a beech tree",
    "at the top of a windy hill",
    "in a mill by the stream",
    "behind a hedge of wild roses",
    "in a den lined with dry leaves",
    "at the end of a winding lane",
    "above the little café on the square",
    "in a cabin among the pines",
)

# Helpers come and go within one episode: indefinite form, definite form, pronoun. None of their species is reserved.
HELPERS: Final[tuple[tuple[str, str, str], ...]] = (
    ("an old owl with round spectacles", "the old owl", "she"),
    ("a tall grey heron", "the heron", "he"),
    ("a toad in a tweed waistcoat", "the toad", "he"),
    ("a snail who was in no hurry", "the snail", "she"),
    ("a crow with ruffled wings", "the crow", "he"),
    ("a very old tortoise", "the tortoise", "she"),
    ("a goat with a long beard", "the goat", "he"),
    ("a swan as white as milk", "the swan", "she"),
    ("a donkey pulling a cart", "the donkey", "he"),
    ("a cricket tuning a tiny violin", "the cricket", "he"),
    ("a beetle in polished boots", "the beetle", "she"),
    ("a sleepy bat", "the bat", "he"),
    ("a busy mother hen", "the hen", "she"),
    ("a magpie with a sack of odds and ends", "the magpie", "she"),
    ("a kind old elk", "the elk", "he"),
    ("a quick brown hare", "the hare", "she"),
    ("a stork with a letter in its beak", "the stork", "he"),
    ("a ladybird having breakfast", "the ladybird", "she"),
    ("a woodpecker on a ladder", "the woodpecker", "he"),
    ("a plump pigeon from the city", "the pigeon", "she"),
    ("an ox with gentle eyes", "the ox", "he"),
    ("a cheerful goose with a shopping list", "the goose", "she"),
)

# Language, greeting, thanks: a line in another script, so that detokenization has something to do.
GREETINGS: Final[tuple[tuple[str, str, str], ...]] = (
    ("Greek", "Γεια σου", "Ευχαριστώ"),
    ("Japanese", "こんにちは", "ありがとう"),
    ("Russian", "Привет", "Спасибо"),
    ("Chinese", "你好", "谢谢"),
    ("Hebrew", "שלום", "תודה"),
    ("Hindi", "नमस्ते", "धन्यवाद"),
    ("Korean", "안녕하세요", "감사합니다"),
    ("Arabic", "مرحبا", "شكرا"),
    ("Ukrainian", "Вітаю", "Дякую"),
    ("Icelandic", "Góðan daginn", "Þakka þér fyrir"),
    ("Turkish", "Günaydın", "Teşekkürler"),
    ("Portuguese", "Olá", "Muito obrigado"),
)

EMOJI: Final[tuple[str, ...]] = ("🌟", "🌈", "🍓", "🎈", "🌻", "🐾", "🎉", "❤️", "🌙", "🍰")

# Plain lists: a slot `{food}` draws from LISTS["food"]; `{food2}` draws another one.
LISTS: Final[dict[str, tuple[str, ...]]] = {
    "food": (
        "warm bread", "honey cakes", "blackberry pie", "mushroom soup", "crêpes", "roasted chestnuts", "apple tart",
        "carrot stew", "ginger biscuits", "plum jam", "pumpkin soup", "cheese pasties", "oat pancakes", "raspberry buns",
        "baked pears", "walnut loaf", "strawberry éclairs", "leek dumplings", "barley porridge", "cherry crumble",
    ),
    "drink": ("mint tea", "hot cocoa", "elderflower cordial", "warm milk", "apple cider", "rosehip tea", "lemonade"),
    "joy": ("glad", "happy", "proud", "cheerful", "delighted", "light-hearted", "merry", "content", "thankful"),
    "worry": ("worried", "sad", "uneasy", "gloomy", "nervous", "downhearted", "anxious", "a little afraid"),
    "rain": (
        "a soft rain began to fall", "big warm raindrops pattered on the leaves", "a cold wind sprang up",
        "snowflakes came whirling down", "grey clouds rolled over the hill, and it poured", "the hail came rattling down",
        "there was a flash, and then a clap of thunder", "a shower swept across the fields",
    ),
    "fair": (
        "the sun came out from behind a cloud", "the sky was as blue as a plum", "a rainbow stretched across the valley",
        "the mist was lifting from the grass", "a warm wind was blowing", "the clouds drifted by like sheep",
        "the birds were singing", "the first sunbeams lay on the hills",
    ),
    "spot": (
        "behind the old mill", "under the stone bridge", "beside the lily pond", "at the edge of the meadow",
        "in the long grass", "among the apple trees", "under the market stalls", "by the garden wall",
        "in the reeds along the river", "beneath the fallen oak", "at the bottom of the well", "around the haystacks",
        "in the blackberry hedge", "on the steps of the town hall", "behind the café", "near the beehives",
        "at the foot of the waterfall", "in the cave behind the ferns", "along the sandy shore", "in the potting shed",
    ),
    "path": (
        "over the hill", "through the tall grass", "along the river", "across the stepping stones",
        "past the windmill", "down the chalky lane", "through the whispering pines", "over the wooden bridge",
        "between the cornfields", "up the steep track", "around the lake", "through the orchard gate",
        "along the old stone wall", "across the heather", "down to the harbour", "through a tunnel of hazel trees",
    ),
    "tree": ("oak", "willow", "chestnut tree", "birch", "pine", "elm", "cherry tree", "rowan", "lime tree", "maple"),
    "flower": ("daisies", "bluebells", "poppies", "buttercups", "violets", "primroses", "cornflowers", "snowdrops"),
    "sound": (
        "a rustle in the leaves", "a soft splash", "a faint humming", "a tiny sneeze", "the snap of a twig",
        "a far-off rumble", "somebody singing", "a scratching noise", "a long, low hoot", "a giggle",
    ),
    "smell": (
        "pine needles", "fresh bread", "wet earth", "wild thyme", "wood smoke", "salt and seaweed", "cut hay",
        "cinnamon", "lavender", "ripe apples",
    ),
    "game": ("hide-and-seek", "leapfrog", "tag", "hopscotch", "follow-my-leader", "pooh-sticks", "I spy", "charades"),
    "song": (
        "\"One step, two step, never mind the rain\"", "\"Over the hill and home again\"",
        "\"The moon is a boatman, the stars are his crew\"", "\"Sing for the sun and sing for the sea\"",
        "\"Hey, ho, the wind may blow\"", "\"Frère Jacques, are you sleeping?\"",
    ),
    "saying": (
        "A long road is short with a friend", "Slow feet get there too", "Look twice, then look once more",
        "Kindness weighs nothing, so carry plenty", "Rain makes the best puddles", "A shared worry is half a worry",
        "Nobody is too small to help", "What is given gladly comes back", "Even the moon has to wait for night",
        "A promise is a seed; look after it",
    ),
    "morning": (
        "one morning", "one bright morning", "early one morning", "one windy afternoon", "on the first day of spring",
        "one Sunday", "on a clear autumn day", "one frosty morning", "just after breakfast one day",
        "on the longest day of summer", "one quiet afternoon", "on a Tuesday in May",
    ),
    "emoji": EMOJI,
}  # fmt: skip
