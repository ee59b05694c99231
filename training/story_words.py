"""The word lists of the story grammar.

Three lists are *reserved*: `NAMES`, `SPECIES` and (in `story_objects`) the object nouns. Their words occur in a story
only in the role of the protagonist, the friend and the treasured object, so that a checker can tell from the text
alone when a generated story has swapped one of them for another.
"""

from __future__ import annotations

from typing import Final

# Name -> subject pronoun. No name is also an English word, so every occurrence is a name.
_SHE = """Pippa Mina Zoë Chloé Nora Tilda Ida Greta Freya Elsie Mabel Inés Åsa Renée Maja Lotte Dora Wilma Nell Tess
Anouk Suki Yuki Amara Leila Priya Rosa Clara Sofia Hanna Zelda Petra Vera Emmy Kiki Lulu Nadia Thea Willa Bibi Olga
Saoirse Hermione Marguerite Xenia Agnieszka"""
_HE = """Pip Milo José André Noël Björn Søren Otto Hugo Felix Oscar Rufus Barnaby Jasper Theo Finn Leo Toby Kofi Ravi
Amir Kenji Tomás Jonah Casper Gus Ned Alfie Bruno Diego Emil Igor Lars Mateo Nico Samir Tariq Victor Zeno Ivo Hamish
Bartholomew Thaddeus Esteban Ludovic Wolfgang"""
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
    Underhill Tumbledown Oakenshaw Heron-Bay Windlemere Saint-Rémy Østerby Plumstead Rookhaven Silverbeck
    Curlew-Point Gullsby Nettlecombe Pipers-Rest Sandwick Ivybridge Dovecote Harrowdale Marigold-Cross
    Wrenfield""".split()
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
    "in an upside-down rowing boat",
    "in a disused railway carriage",
    "under the veranda of the schoolhouse",
    "in a thatched barn by the orchard",
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
    ("a walrus with a toothbrush moustache", "the walrus", "he"),
    ("a pelican delivering newspapers", "the pelican", "he"),
    ("a cockatoo in curlers", "the cockatoo", "she"),
    ("a flamingo on one leg", "the flamingo", "she"),
    ("a drowsy old tomcat", "the tomcat", "he"),
    ("a peacock admiring his own tail", "the peacock", "he"),
    ("a llama chewing thoughtfully", "the llama", "she"),
    ("an anteater with a magnifying glass", "the anteater", "he"),
    ("a grasshopper doing gymnastics", "the grasshopper", "she"),
    ("a weatherbeaten albatross", "the albatross", "he"),
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
    ("Thai", "สวัสดี", "ขอบคุณ"),
    ("Georgian", "გამარჯობა", "მადლობა"),
    ("Armenian", "Բարեւ", "Շնորհակալություն"),
    ("Tamil", "வணக்கம்", "நன்றி"),
    ("Vietnamese", "Xin chào", "Cảm ơn"),
    ("Polish", "Dzień dobry", "Dziękuję"),
    ("Welsh", "Bore da", "Diolch"),
    ("Swahili", "Habari", "Asante"),
    ("Hungarian", "Jó napot", "Köszönöm"),
    ("Finnish", "Hyvää päivää", "Kiitos"),
    ("Hawaiian", "Aloha", "Mahalo"),
    ("Czech", "Dobrý den", "Děkuji"),
)

EMOJI: Final[tuple[str, ...]] = tuple("🌟 🌈 🍓 🎈 🌻 🐾 🎉 ❤️ 🌙 🍰 🦋 🐌 🍄 🎶 ☀️ 🌊 🍀 🔥 🐝 🥕 ⭐ 🎂 🧡 👋🏽".split())

# Plain lists: a slot `{food}` draws from LISTS["food"]; `{food2}` draws another one.
LISTS: Final[dict[str, tuple[str, ...]]] = {
    "food": (
        "warm bread", "honey cakes", "blackberry pie", "mushroom soup", "crêpes", "roasted chestnuts", "apple tart",
        "carrot stew", "ginger biscuits", "plum jam", "pumpkin soup", "cheese pasties", "oat pancakes",
        "raspberry buns", "baked pears", "walnut loaf", "strawberry éclairs", "leek dumplings", "barley porridge",
        "cherry crumble", "cauliflower cheese", "gooseberry fool", "lentil broth", "almond croissants",
        "turnip pasties", "cinnamon rolls", "rhubarb compote", "buckwheat waffles", "peach cobbler", "garlic noodles",
        "jalapeño fritters", "crème brûlée", "sauerkraut", "spinach quiche", "marzipan slices", "poppyseed cake",
    ),
    "snack": (
        "warm bread", "honey cakes", "roasted chestnuts", "apple tart", "ginger biscuits", "cheese pasties",
        "raspberry buns", "walnut loaf", "almond croissants", "cinnamon rolls", "turnip pasties", "marzipan slices",
        "poppyseed cake", "dried figs", "hazelnut wafers", "cold pancakes", "ripe plums", "buttered scones",
    ),
    "drink": (
        "mint tea", "hot cocoa", "elderflower cordial", "warm milk", "apple cider", "rosehip tea", "lemonade",
        "ginger beer", "camomile tea", "malted milk", "pear juice", "sarsaparilla", "barley water",
    ),
    "joy": (
        "glad", "happy", "proud", "cheerful", "delighted", "merry", "content", "pleased", "blissful", "overjoyed",
    ),
    "worry": (
        "worried", "sad", "uneasy", "gloomy", "nervous", "downhearted", "anxious", "a little afraid", "troubled",
        "miserable", "fretful", "wretched", "out of sorts",
    ),
    "rain": (
        "a soft rain began to fall", "big warm raindrops pattered on the leaves", "a cold wind sprang up",
        "snowflakes came whirling down", "grey clouds rolled over the hill, and it poured",
        "the hail came rattling down", "there was a flash, and then a clap of thunder",
        "a shower swept across the fields", "the drizzle turned into a downpour",
        "a squall came tearing through the branches", "sleet stung their cheeks",
    ),
    "fair": (
        "the sun came out from behind a cloud", "the sky was as blue as a plum",
        "a rainbow stretched across the valley", "the mist was lifting from the grass", "a warm wind was blowing",
        "the clouds drifted by like sheep", "the birds were singing", "the first sunbeams lay on the hills",
        "the last puddles were steaming in the sunshine", "a skylark rose, trilling, into the blue",
        "everything glittered with dew",
    ),
    "spot": (
        "behind the old mill", "under the stone bridge", "beside the lily pond", "at the edge of the meadow",
        "in the long grass", "among the apple trees", "under the market stalls", "by the garden wall",
        "in the reeds along the river", "beneath the fallen oak", "at the bottom of the well", "around the haystacks",
        "in the blackberry hedge", "on the steps of the town hall", "behind the café", "near the beehives",
        "at the foot of the waterfall", "in the cave behind the ferns", "along the sandy shore",
        "in the potting shed", "beside the sundial", "on the landing stage", "under the viaduct",
        "between two boulders", "in the ruined chapel", "behind the greenhouse", "near the blacksmith's forge",
        "among the mushrooms", "by the sluice", "inside a hollow stump", "at the railway crossing",
        "next to the scarecrow", "under an upturned barrel", "in the ditch by the turnpike",
        "on the ledge above the quarry",
    ),
    "path": (
        "over the hill", "through the tall grass", "along the river", "across the stepping stones",
        "past the windmill", "down the chalky lane", "through the whispering pines", "over the wooden bridge",
        "between the cornfields", "up the steep track", "around the lake", "through the orchard gate",
        "along the old stone wall", "across the heather", "down to the harbour", "through a tunnel of hazel trees",
        "along the towpath", "past the scarecrow", "through the vineyard", "over the drawbridge", "round the quarry",
        "across the marsh on planks", "down a flight of mossy steps", "along the cliffs",
        "through the sleepy village of Upper Snoring", "past the abandoned observatory", "between the hop poles",
        "up the zigzag path",
    ),
    "tree": (
        "oak", "willow", "chestnut tree", "birch", "pine", "elm", "cherry tree", "rowan", "lime tree", "maple",
        "beech", "hawthorn", "poplar", "sycamore", "alder", "walnut tree", "juniper", "larch",
    ),
    "flower": (
        "daisies", "bluebells", "poppies", "buttercups", "violets", "primroses", "cornflowers", "snowdrops",
        "foxgloves", "cowslips", "dandelions", "marigolds", "hyacinths", "forget-me-nots", "anemones", "harebells",
        "snapdragons", "clover",
    ),
    "sound": (
        "a rustle in the leaves", "a soft splash", "a faint humming", "a tiny sneeze", "the snap of a twig",
        "a far-off rumble", "somebody singing", "a scratching noise", "a long, low hoot", "a giggle",
        "the creak of a gate", "a muffled thump", "an echo", "a squeal of delight", "pebbles trickling down a slope",
        "a very small cough", "the flutter of wings", "a clatter of pans",
    ),
    "smell": (
        "pine needles", "fresh bread", "wet earth", "wild thyme", "wood smoke", "salt and seaweed", "cut hay",
        "cinnamon", "lavender", "ripe apples", "honeysuckle", "roasting coffee", "beeswax", "peppermint", "rosemary",
        "gingerbread",
    ),
    "game": (
        "hide-and-seek", "leapfrog", "tag", "hopscotch", "follow-my-leader", "pooh-sticks", "I spy", "charades",
        "blind man's buff", "dominoes", "noughts and crosses", "skittles", "Simon says", "grandmother's footsteps",
    ),
    "song": (
        '"One step, two step, never mind the rain"', '"Over the hill and home again"',
        '"The moon is a boatman, the stars are his crew"', '"Sing for the sun and sing for the sea"',
        '"Hey, ho, the wind may blow"', '"Frère Jacques, are you sleeping?"', '"My boots are made of butter"',
        '"Seven snails went out to sail"', '"La lune est là, la lune est là"', '"Tumble, thunder, tumble"',
        '"Who has seen the gooseberry king?"', '"Down the valley, up the valley"',
    ),
    "saying": (
        "A long road is short with a friend", "Slow feet get there too", "Look twice, then look once more",
        "Kindness weighs nothing, so carry plenty", "Rain makes the best puddles", "A shared worry is half a worry",
        "Nobody is too small to help", "What is given gladly comes back", "Even the moon has to wait for night",
        "A promise is a seed; look after it", "Measure the river before you jump",
        "Whoever hurries twice arrives once", "A kind word is never out of season",
        "If you cannot go over, go around", "Ask the way and you have half walked it",
        "Patience ripens the hardest pear", "Where two are puzzled, a third may know",
        "A stumble is still a step forward",
    ),
    "morning": (
        "one morning", "one bright morning", "early one morning", "one windy day in March",
        "on the first day of spring",
        "one Sunday", "on a clear autumn day", "one frosty morning", "just after breakfast one day",
        "on the longest day of summer", "one quiet Monday", "on a Tuesday in May", "one sleepy Wednesday",
        "one golden day in September", "on the first of October", "one misty dawn", "in the middle of July",
        "one Saturday in December", "when the swallows had come back", "on the day of the spring equinox",
    ),
    "emoji": EMOJI,
}  # fmt: skip
