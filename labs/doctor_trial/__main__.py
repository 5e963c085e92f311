"""python -m labs.doctor_trial"""

from labs.doctor_trial import main

main()
