"""Prompts of about so many tokens for any tokenizer: common English words, which are one token each in vocabularies
of tens of thousands.

Must not know: requests, targets. The server's usage tells the real length, and the report compares.
"""

import random

_TEXT = """
able above act add after again age air all also always animal answer any arm around art ask away baby back bad bag
ball bank base bear beat bed before began begin behind believe best better between big bird bit black blood blue boat
body bone book both box boy bread break bring brother brown build burn busy buy call came car care carry case cat
catch cause cell chair chance change child church circle city class clean clear climb clock close cloth cloud coast
cold color come common cook cool copy corn corner cost could count country course cover cross cry current cut dance
dark day dead deal death decide deep die direct doctor dog door double down draw dream dress drink drive drop dry
during each ear early earth east easy eat edge effect egg eight else end energy engine enough enter equal even
evening event ever every eye face fact fair fall family far farm fast fat father fear feed feel feet fell few field
fight figure fill final find fine finger fire first fish fit five floor flow flower fly follow food foot force form
forward four free fresh friend front fruit full fun game garden gas gave get girl give glass go gold gone good got
govern grand grass gray great green ground group grow guess gun had hair half hand happy hard has hat have he head
hear heart heat heavy held help here high hill him his history hit hold hole home hope horse hot hour house how huge
human hundred hunt ice idea if inch insect instead iron island job join joy jump just keep kept key kill kind king
knew know lady lake land language large last late laugh law lay lead learn least leave led left leg length less let
letter level lie life lift light like line list listen little live log long look lost lot loud love low machine made
main major make man many map mark market mass master match material matter may me mean meat meet men metal method
middle might mile milk million mind mine minute miss modern money month moon more morning most mother motion mountain
mouth move much music must my name nation natural nature near neck need never new next night nine noise north nose
note nothing notice now number object observe ocean off offer office often oil old once one only open order other our
out over own page paint pair paper parent part party pass past path pattern pay people person picture piece place
plain plan plane plant play please plural poem point poor port pose post pound power press pretty print problem
produce product provide pull push put question quick quiet quite race radio rain raise ran range rate reach read
ready real reason record red remember repeat reply rest result rich ride right ring rise river road rock roll room
root rope rose round row rule run safe said sail salt same sand sat save saw say scale school science sea season seat
second see seed seem self sell send sense sent set seven several shape share sharp she ship shoe shop short should
shout show side sight sign silent silver similar simple since sing single sister sit six size skill skin sky sleep
slow small smell smile snow soft soil soldier some son song soon sound south space speak special speech speed spell
spend spoke spot spread spring square stand star start state station stay steam steel step stick still stone stood
stop store story straight strange stream street strong student study such sudden sugar suit summer sun support sure
surface surprise swim symbol system table tail take talk tall teach team tell ten term test than thank that their
them then there these they thick thin thing think third this those though thought thousand three through tie time
tiny tire together told tone too took tool top total touch toward town track trade train travel tree triangle trip
trouble truck true try tube turn twenty two type under unit until up us use usual valley value vary very view village
visit voice vowel wait walk wall want war warm was wash watch water wave way we wear weather week weight well went
were west what wheel when where which while white who whole why wide wife wild will win wind window winter wish with
woman women wonder wood word work world would write wrong yard year yellow yes yet you young your
"""
WORDS = tuple(_TEXT.split())


def text_of(tokens: int, source: random.Random) -> str:
    """That many words, each after a space."""
    return " " + " ".join(source.choices(WORDS, k=tokens)) if tokens > 0 else ""
